"""Parameter gradients of several objectives on recorded steps, at the weights of kept checkpoints."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from pipelines.replay.objectives import Alternative
from pipelines.replay.rows import ChosenSteps
from pipelines.replay.weights import KeptWeights, NoWeightsError, keeps_updates
from rpg.learner.shards import load_weights
from rpg.replay.gradient import ParameterGradient, parameter_gradient

StepGradients = dict[str, Any]
"""Figures of one step's gradients under two objectives; see `objective_gradients`."""


class Moment(StrEnum):
    """The policy of a step at which a gradient is computed."""

    start = "start"
    """The policy that sampled the step's responses, before its first update: ratios are 1, unless the sampler's own
    logprobs stand for the old ones, and no clip acts."""
    end = "end"
    """The policy after the step's last update: the direction of one more pass over its responses. Clips act."""


def objective_gradients(
    kept: KeptWeights,
    chosen: ChosenSteps,
    own: Alternative,
    others: Sequence[Alternative],
    *,
    moment: Moment,
) -> list[list[StepGradients]]:
    """Returns the comparison of each other objective's gradients with the run's own, an entry for each step:

        step; checkpoint: the step of the weights, 0 for the base model; logprob_change: largest difference between
        these weights' logprobs and the recorded old ones, nats; recorded_norm, replayed_norm: norms of the two
        gradients; cosine: between them, None if a gradient is 0; grad_norm: the recorded metric, None if it is not of
        these weights, see `keeps_updates`.

    Keeps two gradients in memory at a time. Tensors that ranks or a ZeRO stage had split are joined on one device. The
    reference of a divergence that is summed over tokens comes from the checkpoint before the step.

    Raises:
        NoWeightsError: the weights of no chosen step are kept.
    """
    kept.check_base()
    sums = [each.sum for each in (own, *others) if each.sum]
    entries: list[list[StepGradients]] = [[] for _ in others]
    before = 1 if moment is Moment.start else 0
    norms = kept.rows.metric("grad_norm") if before and keeps_updates(own.experiment) else {}
    loops = kept.rows.loops(own.experiment)
    for step in _steps(kept, chosen, before, with_reference=bool(sums)):
        recorded = kept.whole_step(step)
        now = own.experiment.at_step(step, loops.get(step))
        policy = kept.policy(step - 1 if sums else step - before, now, with_reference=bool(sums))
        references = policy.describe(recorded, now, sums) if sums else {}
        if sums and not before and (later := kept.after(step)):
            load_weights(policy.model, later)
        first = parameter_gradient(policy, recorded, now, references)
        for alternative, of_alternative in zip(others, entries, strict=True):
            other = alternative.experiment.at_step(step, loops.get(step))
            gradient = parameter_gradient(policy, recorded, other, references)
            of_alternative.append(
                {
                    "step": step,
                    "checkpoint": step - before,
                    "logprob_change": first.logprob_change,
                    **_compared(first, gradient),
                    "grad_norm": norms.get(step),
                }
            )
    return entries


def _compared(first: ParameterGradient, other: ParameterGradient) -> dict[str, float | None]:
    recorded, replayed = first.norm, other.norm
    product = recorded * replayed
    cosine = first.dot(other) / product if product else None
    return {"recorded_norm": recorded, "replayed_norm": replayed, "cosine": cosine}


def _steps(kept: KeptWeights, chosen: ChosenSteps, before: int, *, with_reference: bool) -> list[int]:
    """Returns the chosen steps whose weights are kept, or the last such step if none is chosen.

    Args:
        before: number of steps before a step at which its weights were saved, 0 or 1.
        with_reference: whether the weights before the step are needed as well.
    """
    saved = {0, *kept.steps}
    needed = {before, 1} if with_reference else {before}
    possible = [step for step in kept.rows.steps() if all(step - earlier in saved for earlier in needed)]
    if steps := [step for step in possible if step in chosen]:
        return steps[-1:] if chosen.all else steps
    hint = f"; use --step {' or '.join(map(str, possible))}" if possible else ""
    of = {
        frozenset({1}): "the step before (for step 1 the base model)",
        frozenset({0}): "that step",
        frozenset({0, 1}): "that step and of the one before",
    }[frozenset(needed)]
    raise NoWeightsError(f"{kept.run.path.name}: gradients need the checkpoint of {of}; {kept.listed}{hint}")
