"""Computes a recorded step's loss and gradient weights under an objective, without sampling.

The records hold all inputs of a gradient. For each token: the entropy, and the logprobs of the policy at the token's
last update, of the policy that sampled and of the reference. For each response: the reward, its group and whether it
was cut. The training objective reproduces the recorded ratios, clips and losses; another one shows what it would have
done with the same rollouts. That is one alternative step, not a second run: later steps would have sampled other
responses.

Only the value of the entropy bonus is recorded: its gradient needs the whole distribution of each token. A divergence
that is summed over tokens is not recorded: `kept` computes it from weights, again without the sum's gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rpg.advantages import response_means
from rpg.batches.batch import Microbatch, StepRollouts
from rpg.batches.minibatches import Minibatch, cut, plan_step
from rpg.batches.step_loss import pass_loss, step_advantages
from rpg.objectives import TokenBatch
from rpg.objectives.distribution import StateDivergence
from specs.schema.experiment import Experiment
from specs.schema.objective import Divergence, Objective, RegularizedObjective
from specs.schema.schedule import constant

PASS_TOKENS = 2**18
"""Number of tokens, including padding, that are processed at once. Each takes a few hundred bytes."""
Sum = tuple[Divergence, int]
"""A divergence, and the number of the reference's most likely tokens that it is summed over; 0 for all of them."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step: B responses, of which the policy sampled M tokens."""

    step: int
    rollouts: StepRollouts
    """Rollouts of the step. Prompts and given tokens may be left out if only losses are needed, because losses do not
    depend on them."""
    positions: npt.NDArray[np.int64]
    """Position of each sampled token in its response, counting given tokens. [M]"""
    ledger: dict[str, Tensor]
    """Columns of the token table, NaN for tokens that were not trained on. [M] each"""
    advantages: npt.NDArray[np.float64]
    """Advantage of each response. [B]"""
    states: Mapping[Sum, StateDivergence] = field(default_factory=dict)
    """Divergences at the state before each token, summed over tokens. Not recorded: see `rpg.replay.kept`. [M] each"""

    @property
    def trained(self) -> Tensor:
        """Returns whether each token was trained on, bool. All logprobs of such a token are recorded. [M]"""
        return _trained(self.ledger)


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """The values of an objective for a recorded step's tokens, [M] each. They are 0 or False for tokens that were not
    trained on."""

    trained: Tensor
    """Whether the token was trained on."""
    advantages: Tensor
    """Advantage of each token, including those that were not trained on."""
    losses: Tensor
    """Loss of each token with correction and bonus, before the aggregation."""
    weight: Tensor
    """m: minus the derivative of the objective's token losses with respect to log π."""
    correction: Tensor
    """Factor that `rollout.correction` puts on a token's loss."""
    share: Tensor
    """Factor that the aggregation puts on a token's loss."""
    gradient: Tensor
    """m times the correction and the share, without the bonus."""
    bonus: Tensor
    """The entropy bonus's part of the token losses."""
    penalty: Tensor
    """The divergence's part of the token losses."""
    penalty_weight: Tensor
    """The divergence's part of the weight."""
    ratio: Tensor
    """This and all later fields are those of `ObjectiveEvaluation`."""
    clipped: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor
    kl_reverse: Tensor
    kl_forward: Tensor
    kl_behaviour: Tensor


def sum_of(objective: Objective) -> Sum | None:
    """Returns the divergence that an objective sums over tokens, and over how many; None if it sums none."""
    if objective.summed_over == "sampled" or not isinstance(objective, RegularizedObjective):
        return None
    return objective.divergence, objective.top_k


def _trained(columns: Mapping[str, Tensor]) -> Tensor:
    logprobs = [columns[name] for name in ("logprobs", "old_logprobs", "ref_logprobs")]
    return torch.stack(logprobs).isfinite().all(0)


def replay_step(recorded: RecordedStep, experiment: Experiment) -> ReplayedStep:
    """Returns a recorded step under an experiment's objective, advantage, correction, minibatches and aggregation.

    Ratios, weights and clips are computed in float32, as in training.

    Args:
        experiment: the experiment at this step, see `Experiment.at_step`. If its objective sums a divergence over
            tokens, the step has the `states` of that sum.
    Raises:
        ValueError: as in `token_advantages`.
    """
    trained, advantages = recorded.trained, replayed_advantages(recorded, experiment)
    over = sum_of(experiment.objective)
    columns = {
        field.name: torch.zeros(len(trained), dtype=torch.bool if "clipped" in field.name else torch.float32)
        for field in fields(ReplayedStep)
        if field.name not in ("trained", "advantages")
    }
    training = experiment.training.model_copy(update={"microbatch_tokens": PASS_TOKENS})
    for minibatch in cut(recorded.rollouts, plan_step(recorded.rollouts, training), torch.device("cpu")):
        for batch in minibatch.passes:
            if not batch.counts:
                continue
            tokens, entropies = recorded_tokens(recorded, batch, advantages, over and recorded.states[over])
            untrained = tokens.response_mask == 0
            for name, values in _replayed(experiment, minibatch, batch, tokens, entropies).items():
                columns[name][batch.tokens] = batch.pick(values.detach().masked_fill(untrained, 0))
    return ReplayedStep(trained=trained, advantages=advantages, **columns)


def recorded_tokens(
    recorded: RecordedStep, batch: Microbatch, advantages: Tensor, state: StateDivergence | None
) -> tuple[TokenBatch, Tensor]:
    """Returns a pass's tokens with their recorded logprobs [b, T], and the recorded entropies [n], on the pass's
    device.

    Tokens that were not trained on are masked.

    Args:
        advantages: advantage of every token of the step. [M]
        state: the divergence at every token of the step, if the objective sums it over tokens. [M]
    """
    places = batch.tokens.cpu()
    columns = {
        name: recorded.ledger[name][places] for name in ("logprobs", "old_logprobs", "ref_logprobs", "entropies")
    }
    trained = _trained(columns)
    columns = {name: torch.where(trained, values, 0.0).to(batch.targets.device) for name, values in columns.items()}
    entropies = columns.pop("entropies")
    tokens = TokenBatch(
        logprobs=batch.spread(columns["logprobs"]),
        old_logprobs=batch.spread(columns["old_logprobs"]),
        ref_logprobs=batch.spread(columns["ref_logprobs"]),
        advantages=batch.spread(advantages[places].to(entropies)),
        response_mask=batch.spread(trained.to(entropies)),
        state=state and state.each(lambda values: batch.spread(values[places].to(entropies.device))),
    )
    return tokens, entropies


def _replayed(
    experiment: Experiment, minibatch: Minibatch, batch: Microbatch, tokens: TokenBatch, entropies: Tensor
) -> dict[str, Tensor]:
    """Returns the fields of `ReplayedStep` that depend on a pass, [b, T] each."""
    tokens.logprobs.requires_grad_()
    result = pass_loss(experiment, minibatch, batch, tokens, entropies)
    reward_alone = experiment.objective.with_kl_coef(0.0)
    without = pass_loss(experiment.model_copy(update={"objective": reward_alone}), minibatch, batch, tokens, entropies)
    (share,) = torch.autograd.grad(result.loss, result.token_losses)
    evaluation = result.evaluation
    return {
        **evaluation.diagnostics(),
        "clipped": evaluation.clipped,
        "losses": result.token_losses,
        "correction": result.correction,
        "share": share,
        "gradient": evaluation.weight * result.correction * share,
        "bonus": -constant(experiment.training.entropy_coef) * batch.spread(entropies),
        "penalty": evaluation.losses * result.correction - without.evaluation.losses * result.correction,
        "penalty_weight": evaluation.weight - without.evaluation.weight,
    }


def replayed_advantages(recorded: RecordedStep, experiment: Experiment) -> Tensor:
    """Returns the advantage of every token from the recorded rewards. [M]

    Tokens that were not trained on have no recorded penalty."""
    old_logprobs, ref_logprobs = (recorded.ledger[name].nan_to_num(0.0) for name in ("old_logprobs", "ref_logprobs"))
    return step_advantages(experiment, recorded.rollouts, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)


def response_advantages(recorded: RecordedStep, replayed: ReplayedStep) -> Tensor:
    """Returns the advantage of every response, as in the table `rollouts`. [B]"""
    return response_means(replayed.advantages, torch.from_numpy(recorded.rollouts.num_sampled))
