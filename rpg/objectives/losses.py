"""From an objective as a spec has it to the loss of each token."""

from torch import Tensor

from rpg.objectives.regularized import (
    differentiable_loss,
    dual_clip_differentiable_loss,
    dual_clip_weight,
    plain_weight,
    reinforce_loss,
)
from rpg.objectives.terms import Terms, sequence_terms, token_terms
from specs.schema.objective import DualClip, Objective, RegularizedObjective

LEVELS = {"token": token_terms, "sequence": sequence_terms}


def token_losses(
    objective: Objective,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
) -> Tensor:
    """The loss of each token, to be minimised; not masked, not averaged: see aggregate.py.

    Args:
        objective: from a spec, or from `specs.parse_objective`.
        logprobs: [batch, time], log pi(y_t | x, y_<t) under the policy being trained, nats. The only differentiable input.
        old_logprobs: the same tokens under the policy that the step's rollouts count as sampled from, nats. Constant.
        ref_logprobs: the same tokens under the reference policy, nats. Constant; equal to `old_logprobs` where that is the reference.
        advantages: reward units. Constant. Where ratios are of whole responses, its mean over a response counts.
        response_mask: 1 on tokens the policy sampled and we train on. What stands elsewhere, NaN included, changes nothing.
    Returns:
        [batch, time], float32 or wider; the sum over the positions where `response_mask` is 1 is the loss of the sequence.
        A log-ratio above 80 nats is held there, so the loss and its gradient stay finite; lower ones underflow to ratio 0.
    Raises:
        ValueError: shapes that differ.
    """
    terms = LEVELS[objective.level](
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        response_mask=response_mask,
    )
    if objective.estimator == "reinforce":
        return reinforce_loss(terms, regularized_weight(objective, terms))
    return terms.per_token(_differentiable(objective, terms))


def regularized_weight(objective: RegularizedObjective, terms: Terms) -> Tensor:
    """The gradient weight of the REINFORCE estimator under the objective's clip."""
    clip = objective.clip
    if isinstance(clip, DualClip):
        return dual_clip_weight(
            terms,
            divergence=objective.divergence,
            kl_coef=objective.kl_coef,
            low=clip.low,
            high=clip.high,
            dual=clip.dual,
        )
    return plain_weight(terms, divergence=objective.divergence, kl_coef=objective.kl_coef)


def _differentiable(objective: RegularizedObjective, terms: Terms) -> Tensor:
    clip = objective.clip
    if isinstance(clip, DualClip):
        return dual_clip_differentiable_loss(
            terms,
            divergence=objective.divergence,
            kl_coef=objective.kl_coef,
            low=clip.low,
            high=clip.high,
            dual=clip.dual,
        )
    return differentiable_loss(terms, divergence=objective.divergence, kl_coef=objective.kl_coef)
