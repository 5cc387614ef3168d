"""One evaluation of an objective on a batch of tokens: the losses, and all that is shown of them while training."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rpg.objectives import formula, regularized, rivals  # noqa: F401  (the equations, which register themselves)
from rpg.objectives.clipping import Clipped
from rpg.objectives.kl import penalty, token_divergences
from rpg.objectives.registry import equation
from rpg.objectives.terms import TERMS, Terms, TokenBatch, token_terms
from specs.schema.objective import Objective, PublishedObjective
from specs.schema.schedule import constant


@dataclass(frozen=True, slots=True)
class ObjectiveEvaluation:
    """An objective's values for each token, all [batch, time]. All but the losses are constant, and 0 or False where
    `response_mask` is 0."""

    losses: Tensor
    """Losses of the tokens, as `token_losses` gives them."""
    weight: Tensor
    """m, the factor of ∇log π in minus the gradient of the sum of the losses."""
    ratio: Tensor
    """π/π_old of what the objective takes it over: the token, the response, or its geometric mean."""
    clipped_low: Tensor
    """bool, where the lower margin of the clip acts; at most one side acts on a token."""
    clipped_high: Tensor
    """bool, where the upper margin acts."""
    clipped_dual: Tensor
    """bool, where the bound for negative advantages acts."""
    kl_reverse: Tensor
    """Nats, ≥ 0; its mean over tokens estimates KL(π ‖ π_ref) without bias, states drawn by the sampler."""
    kl_forward: Tensor
    """Estimate of KL(π_ref ‖ π) at each token, nats."""
    kl_behaviour: Tensor
    """Estimate of KL(π_old ‖ π) at each token, nats."""

    @property
    def clipped(self) -> Tensor:
        """bool, where any side of the clip acts."""
        return self.clipped_low | self.clipped_high | self.clipped_dual

    def diagnostics(self) -> dict[str, Tensor]:
        """All but the losses, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "losses"}


def evaluate_objective(objective: Objective, batch: TokenBatch) -> ObjectiveEvaluation:
    """The losses of a batch, differentiable where its logprobs are, and what can be seen of them.

    The weight is the gradient by `logprobs` of these very losses, which stay differentiable: it goes no further back.
    """
    differentiable = batch.logprobs.requires_grad
    leaf = batch.logprobs if differentiable else batch.logprobs.detach().requires_grad_()
    with torch.enable_grad():
        prepared = replace(batch, logprobs=leaf).prepared()
        losses, clipped, terms, tokens = _losses(objective, prepared)
        counted = torch.where(prepared.response_mask, losses, 0.0).sum()
        (gradient,) = torch.autograd.grad(counted, leaf, retain_graph=differentiable)
    with torch.no_grad():
        per_token = {
            "weight": -gradient,
            "ratio": terms.ratio,
            "clipped_low": clipped.low,
            "clipped_high": clipped.high,
            "clipped_dual": clipped.dual,
            **token_divergences(tokens),
        }
        masked = {
            name: torch.where(prepared.response_mask, values, torch.zeros_like(values))
            for name, values in per_token.items()
        }
    return ObjectiveEvaluation(losses=losses if differentiable else losses.detach(), **masked)


def token_losses(
    objective: Objective,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    entropy: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    rewards: Tensor | None = None,
) -> Tensor:
    """The loss of each token, to be minimised; not masked, not averaged: see aggregate.py.

    Args:
        objective: from a spec, or from `specs.parse_objective`; where schedules change it over training, what
            `specs.schema.schedule.at_step` makes of it.
        logprobs: [batch, time], log π(y_t | x, y_<t) under the policy being trained, nats. The only differentiable
            input.
        old_logprobs: the same tokens under the policy that the step counts as its sampler, nats. Constant.
        ref_logprobs: the same tokens under the reference policy, nats. Constant. `old_logprobs` where the sampler is
            the reference.
        advantages: reward units. Constant. Where ratios are of whole responses, its mean over a response counts.
        response_mask: 1 on tokens the policy sampled and we train on. What stands elsewhere, NaN included, changes
            nothing.
        entropy, rollout_logprobs, rewards: H, log p_engine and R, [batch, time] or [batch, 1], where a formula reads
            them. Constant.
    Returns:
        [batch, time], float32 or wider; the sum over the positions where `response_mask` is 1 is the loss of the
        sequence. A ratio whose logarithm exceeds 60 nats is held there, so the loss and its gradient stay finite; a
        differentiated ratio passes no gradient there. Small ratios underflow to 0.
    Raises:
        ValueError: shapes that differ, a knob that is still a schedule, or an input missing that a formula reads.
    """
    batch = TokenBatch(
        logprobs, old_logprobs, ref_logprobs, advantages, response_mask, entropy, rollout_logprobs, rewards
    )
    return _losses(objective, batch.prepared())[0]


def _losses(objective: Objective, batch: TokenBatch) -> tuple[Tensor, Clipped, Terms, Terms]:
    """Parts of a prepared batch: the losses with the penalty, where the clip acts, and the terms of the objective's
    ratio and of single tokens."""
    tokens = token_terms(batch)
    terms = tokens if objective.ratio_over == "token" else TERMS[objective.ratio_over](batch)
    losses, clipped = equation(objective, terms)
    if isinstance(objective, PublishedObjective) and objective.penalizes_loss:
        estimate = penalty(tokens, estimator=objective.kl_estimator, weighted=objective.kl_weighted)
        losses = losses + constant(objective.kl_coef) * estimate
    return losses, clipped, terms, tokens
