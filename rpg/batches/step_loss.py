"""Computes a step's differentiable loss from its rollouts: the advantages of its tokens, and the loss of each pass.

The trainer differentiates the losses; `rpg replay` recomputes them from the records.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rpg.advantages import advantages, normalized_sum, token_advantages, turn_returns
from rpg.batches.batch import Microbatch, StepRollouts
from rpg.batches.minibatches import Minibatch
from rpg.objectives import ObjectiveEvaluation, TokenBatch, evaluate_objective
from rpg.objectives.aggregate import aggregate
from rpg.objectives.correction import correction_weight, mismatch_diagnostics, rollout_ratio
from specs.schema.experiment import Experiment
from specs.schema.schedule import constant


def step_advantages(
    experiment: Experiment,
    rollouts: StepRollouts,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
) -> Tensor:
    """Returns the advantage of every sampled token of a step that this rank holds. [M] All ranks call it.

    Args:
        old_logprobs, ref_logprobs: nats; needed if the objective `penalizes_reward`. [M]
    """
    return token_advantages(
        experiment.objective,
        experiment.advantage,
        rewards=trained_rewards(experiment, rollouts),
        group_ids=torch.from_numpy(rollouts.group_ids),
        lengths=torch.from_numpy(rollouts.num_sampled),
        held=torch.from_numpy(rollouts.held),
        turns=torch.from_numpy(rollouts.token_turns) if experiment.advantage.credit == "turn" else None,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
    )


def trained_rewards(experiment: Experiment, rollouts: StepRollouts) -> Tensor:
    """Returns the rewards of all responses as `advantage.rewards` defines them [B] or, with `advantage.credit: turn`,
    the return from each turn on [B, turns]. A penalty on length is added unchanged.

    If each term is normalised, rewards of turns are a term of weight 1.
    """
    advantage = experiment.advantage
    by_turn = advantage.credit == "turn"
    if advantage.rewards == "summed" and not by_turn:
        return torch.from_numpy(rollouts.rewards)
    group_ids = torch.from_numpy(rollouts.group_ids)
    returns = turn_returns(rollouts.turn_rewards or [(0.0,)] * len(group_ids))
    if not by_turn:
        returns = returns[:, 0]
    if advantage.rewards == "summed":
        values = torch.tensor([score.value for score in rollouts.scores], dtype=torch.float64)
    else:
        terms, weights = (torch.from_numpy(each) for each in rollouts.reward_terms())
        values = normalized_sum(terms, weights, group_ids)
        columns = returns.reshape(len(returns), -1).unbind(1)
        each = [advantages(column, group_ids, baseline="group_mean", scale="group_std") for column in columns]
        returns = torch.stack(each, 1).reshape(returns.shape)
    values = values + torch.tensor([score.penalty for score in rollouts.scores])
    return values[:, None] + returns if by_turn else values + returns


@dataclass(frozen=True, slots=True)
class PassLoss:
    """A pass's contribution to the loss of its update. Tensors of tokens are [b, T]."""

    loss: Tensor
    """The pass's part of the update's loss, a scalar. The parts of all passes and ranks add up to that loss."""
    token_losses: Tensor
    """Loss of each token, with correction and entropy bonus, not masked. `loss` is their aggregate."""
    evaluation: ObjectiveEvaluation
    """Evaluation of the objective alone."""
    correction: Tensor
    """Factor on each token's loss that corrects for the difference between sampling engine and learner."""
    mismatch: dict[str, Tensor]
    """Distance between sampling engine and learner; see `mismatch_diagnostics`."""

    def diagnostics(self) -> dict[str, Tensor]:
        """Returns the values of tokens that metrics are computed from, by name: those of the evaluation and of the
        mismatch."""
        return self.evaluation.diagnostics() | self.mismatch


def pass_loss(
    experiment: Experiment, minibatch: Minibatch, batch: Microbatch, tokens: TokenBatch, entropies: Tensor
) -> PassLoss:
    """Returns the aggregate of the objective's losses, times the correction, minus the entropy bonus.

    Args:
        minibatch: the update of the pass; its counts are the denominators.
        tokens: the pass's tokens, [b, T].
        entropies: entropy of the policy at each sampled token, nats. [n]
    """
    mask, correction = tokens.response_mask, experiment.rollout.correction
    rollout_logprobs = batch.spread(batch.rollout_logprobs.to(tokens.old_logprobs))
    ratio = rollout_ratio(tokens.old_logprobs, rollout_logprobs, mask)
    weight, acted = correction_weight(correction, tokens.old_logprobs, rollout_logprobs, mask)
    if read := experiment.objective.symbols & {"H", "p_engine", "R"}:
        tokens = replace(
            tokens,
            entropy=batch.spread(entropies.detach()) if "H" in read else None,
            rollout_logprobs=rollout_logprobs if "p_engine" in read else None,
            rewards=batch.rewards[:, None].to(tokens.old_logprobs) if "R" in read else None,
        )
    evaluation = evaluate_objective(experiment.objective, tokens)
    token_losses = evaluation.losses * weight
    if entropy_coef := constant(experiment.training.entropy_coef):
        token_losses = token_losses - entropy_coef * batch.spread(entropies)
    loss = aggregate(
        token_losses,
        mask,
        aggregation=experiment.objective.aggregation,
        num_tokens=minibatch.num_tokens,
        num_sequences=minibatch.num_sequences,
        max_response_length=experiment.rollout.max_response_length,
    )
    return PassLoss(loss, token_losses, evaluation, weight, mismatch_diagnostics(ratio, acted))
