"""From an objective as a spec has it to the loss of each token."""

from functools import partial

import torch
from torch import Tensor

from rpg.objectives.clipped import capped_loss, clipped_loss, over_cap
from rpg.objectives.clipping import (
    Clipped,
    clamp_ratio,
    dual_clipped,
    nothing_clipped,
    ppo_clipped,
    regularized_clipped,
)
from rpg.objectives.kl import penalty
from rpg.objectives.regularized import (
    algorithm_1_loss,
    clamped_divergence_weight,
    differentiable_loss,
    dual_clip_differentiable_loss,
    plain_weight,
    regularized_advantage,
    reinforce_loss,
    truncated_weight,
)
from rpg.objectives.terms import Terms, geometric_terms, sequence_terms, token_terms
from specs.schema.objective import (
    Cispo,
    ClippedRival,
    DualClip,
    NoClip,
    Objective,
    RegularizedObjective,
    TruncateClip,
)


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
        logprobs: [batch, time], log pi(y_t | x, y_<t) under the policy being trained, nats. The only differentiable
            input.
        old_logprobs: the same tokens under the policy that the step counts as its sampler, nats. Constant.
        ref_logprobs: the same tokens under the reference policy, nats. Constant. `old_logprobs` where the sampler is
            the reference.
        advantages: reward units. Constant. Where ratios are of whole responses, its mean over a response counts.
        response_mask: 1 on tokens the policy sampled and we train on. What stands elsewhere, NaN included, changes
            nothing.
    Returns:
        [batch, time], float32 or wider; the sum over the positions where `response_mask` is 1 is the loss of the
        sequence. A ratio whose logarithm exceeds 60 nats is held there, so the loss and its gradient stay finite; a
        differentiated ratio passes no gradient there. Small ratios underflow to 0.
    Raises:
        ValueError: shapes that differ.
    """
    inputs = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "advantages": advantages,
        "response_mask": response_mask,
    }
    terms = terms_of(objective, **inputs)
    if isinstance(objective, RegularizedObjective):
        if objective.estimator == "reinforce":
            return reinforce_loss(terms, _reinforce_weight(objective, terms))
        return terms.per_token(_differentiable(objective, terms))
    loss = _policy_loss(objective, terms)
    if objective.kl_in == "reward" or objective.kl_coef == 0:
        return loss
    estimate = penalty(token_terms(**inputs), estimator=objective.kl_estimator, weighted=objective.kl_weighted)
    return loss + objective.kl_coef * estimate


def terms_of(
    objective: Objective,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
) -> Terms:
    """The batch with ratios taken over what the objective takes them over."""
    make = {"token": token_terms, "sequence": sequence_terms, "geometric_mean": geometric_terms}
    return make[objective.ratio_over](
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        response_mask=response_mask,
    )


def clipped_where(objective: Objective, terms: Terms) -> Clipped:
    """Where the objective's clip acts on the batch."""
    ratio = terms.ratio.detach()
    if isinstance(objective, RegularizedObjective):
        return _regularized_clipped(objective, terms)
    if isinstance(objective, Cispo):
        return over_cap(ratio, max_ratio=objective.max_ratio)
    clip = objective.clip
    return ppo_clipped(ratio, terms.advantages, low=clip.low, high=clip.high, dual=clip.dual or float("inf"))


def _policy_loss(objective: ClippedRival | Cispo, terms: Terms) -> Tensor:
    if isinstance(objective, Cispo):
        return capped_loss(terms, max_ratio=objective.max_ratio)
    clip = objective.clip
    return clipped_loss(terms, low=clip.low, high=clip.high, dual=clip.dual)


def _reinforce_weight(objective: RegularizedObjective, terms: Terms) -> Tensor:
    """The gradient weight of the REINFORCE estimator under the objective's clip."""
    clip, divergence, kl_coef = objective.clip, objective.divergence, objective.kl_coef
    if isinstance(clip, NoClip):
        return plain_weight(terms, divergence=divergence, kl_coef=kl_coef)
    if isinstance(clip, TruncateClip):
        return truncated_weight(terms, divergence=divergence, kl_coef=kl_coef, low=clip.low, high=clip.high)
    clamped = clamped_divergence_weight(terms, divergence=divergence, kl_coef=kl_coef, low=clip.low, high=clip.high)
    if clip.branch == "raw":
        active = terms.ratio.detach() * terms.advantages + clamped
    else:
        active = plain_weight(terms, divergence=divergence, kl_coef=kl_coef)
    inactive = clamped if clip.keep_divergence else torch.zeros_like(clamped)
    return torch.where(_regularized_clipped(objective, terms).any, inactive, active)


def _differentiable(objective: RegularizedObjective, terms: Terms) -> Tensor:
    clip = objective.clip
    if isinstance(clip, DualClip):
        loss = algorithm_1_loss if clip.branch == "regularized" else dual_clip_differentiable_loss
        surrogate = partial(loss, low=clip.low, high=clip.high, dual=clip.dual)
        return surrogate(terms, divergence=objective.divergence, kl_coef=objective.kl_coef)
    return differentiable_loss(terms, divergence=objective.divergence, kl_coef=objective.kl_coef)


def _regularized_clipped(objective: RegularizedObjective, terms: Terms) -> Clipped:
    clip, ratio = objective.clip, terms.ratio.detach()
    if isinstance(clip, NoClip):
        return nothing_clipped(ratio)
    if isinstance(clip, TruncateClip):
        held = clamp_ratio(ratio, low=clip.low, high=clip.high)
        return Clipped(low=ratio < held, high=ratio > held, dual=torch.zeros_like(ratio, dtype=torch.bool))
    margins = {"low": clip.low, "high": clip.high, "dual": clip.dual}
    if clip.branch == "raw":
        rule = dual_clipped if objective.estimator == "reinforce" else ppo_clipped
        return rule(ratio, terms.advantages, **margins)
    divergence, kl_coef = objective.divergence, objective.kl_coef
    if objective.estimator == "reinforce":
        weight = plain_weight(terms, divergence=divergence, kl_coef=kl_coef)
        return regularized_clipped(ratio, weight, **margins)
    advantages = regularized_advantage(terms, divergence=divergence, kl_coef=kl_coef)
    return ppo_clipped(ratio, advantages.detach(), **margins)
