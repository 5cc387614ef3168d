"""Parameter gradients of several objectives on recorded steps, at the weights of kept checkpoints."""

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.replay.objectives import Alternative
from pipelines.replay.rows import ChosenSteps, RunRows
from rpg.checkpoints.checkpoint import defect
from rpg.data.loading import encode_prompts
from rpg.pretrained import tokenizer_of
from rpg.processes.device import device_at_hand
from rpg.recording.run_directory import RunDirectory
from rpg.replay.gradient import KeptPolicy, ParameterGradient, parameter_gradient
from specs.errors import RpgError
from specs.schema.experiment import Experiment

StepGradients = dict[str, Any]
"""Figures of one step's gradients under two objectives; see `objective_gradients`."""


class NoWeightsError(RpgError):
    """Error for gradients at weights that were not kept."""


class Moment(StrEnum):
    """The policy of a step at which a gradient is computed."""

    start = "start"
    """The policy that sampled the step's responses, before its first update: ratios are 1, unless the sampler's own
    logprobs stand for the old ones, and no clip acts."""
    end = "end"
    """The policy after the step's last update: the direction of one more pass over its responses. Clips act."""


def objective_gradients(
    rows: RunRows,
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
        these weights, see `records_gradient_of`.

    Keeps two gradients in memory at a time. Tensors that ranks or a ZeRO stage had split are joined on one device.

    Raises:
        NoWeightsError: the weights of no chosen step are kept.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    run, experiment = RunDirectory(rows.home.run(rows.run_id)), own.experiment
    base = run.path / run.inputs()["base"]
    entries: list[list[StepGradients]] = [[] for _ in others]
    before = 1 if moment is Moment.start else 0
    steps = _steps(run, base, rows.steps(), chosen, before)
    device = device_at_hand(experiment.resources)  # a run of a machine with GPUs may be replayed on one without
    norms = rows.metric("grad_norm") if before and records_gradient_of(experiment) else {}
    loops = rows.loops(experiment)
    encode = partial(encode_prompts, tokenizer_of(base), data=experiment.data)
    for step in steps:
        recorded = rows.whole_step(step, encode)
        checkpoint = _checkpoint(run, step - before) if step > before else None
        now = experiment.at_step(step, loops.get(step))
        policy = KeptPolicy.load(base, checkpoint, now, device)
        first = parameter_gradient(policy, recorded, now)
        for alternative, of_alternative in zip(others, entries, strict=True):
            other = parameter_gradient(policy, recorded, alternative.experiment.at_step(step, loops.get(step)))
            of_alternative.append(
                {
                    "step": step,
                    "checkpoint": step - before,
                    "logprob_change": first.logprob_change,
                    **_compared(first, other),
                    "grad_norm": norms.get(step),
                }
            )
    return entries


def records_gradient_of(experiment: Experiment) -> bool:
    """Returns whether the metric grad_norm is the norm of one gradient at the weights with which the step started.

    Otherwise it is a mean over several updates, of which only the first started there, or the gradient was computed at
    other weights, as in schedule_free_adamw.
    """
    training = experiment.training
    return training.minibatches * training.epochs == 1 and training.optimizer.type == "adamw"


def _compared(first: ParameterGradient, other: ParameterGradient) -> dict[str, float | None]:
    recorded, replayed = first.norm, other.norm
    product = recorded * replayed
    cosine = first.dot(other) / product if product else None
    return {"recorded_norm": recorded, "replayed_norm": replayed, "cosine": cosine}


def _steps(run: RunDirectory, base: Path, on_record: Sequence[int], chosen: ChosenSteps, before: int) -> list[int]:
    """Returns the chosen steps whose weights are kept, or the last such step if none is chosen.

    Args:
        before: number of steps before a step at which its weights were saved, 0 or 1.
    """
    if not (base / "config.json").is_file():
        raise NoWeightsError(f"{run.path.name}: the base model is no longer at {base}")
    kept = sorted(int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*"))
    possible = [step for step in on_record if step == before or step - before in kept]
    if steps := [step for step in possible if step in chosen]:
        return steps[-1:] if chosen.all else steps
    at = f"checkpoints are kept at steps {', '.join(map(str, kept))}" if kept else "no checkpoint is kept"
    hint = f"; --step {' or '.join(map(str, possible))} can be taken" if possible else ""
    needed = "the step before (for step 1 the base model)" if before else "that step"
    raise NoWeightsError(f"{run.path.name}: gradients need the checkpoint of {needed}; {at}{hint}")


def _checkpoint(run: RunDirectory, step: int) -> Path:
    directory = run.checkpoints / f"step-{step:06}"
    if damage := defect(directory):
        raise NoWeightsError(f"{run.path.name}: the checkpoint of step {step} is damaged: {damage}")
    return directory
