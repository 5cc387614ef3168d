"""Regularized policy gradient: expected reward minus β times a divergence from the reference, and its clips.

K(w) is the divergence's part of the gradient weight m, see `divergence`; β is `kl_coef`. Weights are constants. At
token level an entry is a token, at sequence level a whole response.

Source: Zhang 2025, arXiv:2505.17508. Differs: sampler and reference may be two policies.
"""

from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

from rpg.objectives.clipping import (
    Clipped,
    clamp_ratio,
    dual_clipped,
    nothing_clipped,
    ppo_clipped,
    ppo_surrogate,
    regularized_clipped,
)
from rpg.objectives.divergence import (
    LOSSES,
    WEIGHTS,
    rest_loss,
    rest_weight,
    state_loss,
    to_go_loss,
    to_go_weight,
)
from rpg.objectives.registry import equation
from rpg.objectives.terms import Terms, bounded_exp
from specs.schema.objective import Divergence, RegularizedObjective
from specs.schema.schedule import constant


@equation.register
def regularized_policy_gradient(objective: RegularizedObjective, terms: Terms) -> tuple[Tensor, Clipped]:
    """reinforce: −SG(m) log π; differentiable: −w A + β D

    The clip changes m, or −w A. The losses of a response's tokens sum to the response's loss. If the divergence is
    summed over tokens, its sum is added unclipped, and K and D are those of the rest.
    """
    terms = replace(terms, to_go=True) if objective.level == "to_go" else terms
    if objective.summed_over == "sampled":
        terms = replace(terms, state=None)
    elif terms.state is None:
        raise ValueError(f"`kl: {objective.kl}` needs the divergence at each state, which is missing")
    if objective.estimator == "reinforce":
        weight, clipped = _clipped_weight(objective, terms)
        losses = -weight * terms.logprobs
    else:
        losses, clipped = _clipped_loss(objective, terms)
        losses = terms.per_token(losses)
    if terms.state is not None:
        losses = losses + constant(objective.kl_coef) * state_loss(objective.divergence, terms)
    return losses, clipped


def _clipped_weight(objective: RegularizedObjective, terms: Terms) -> tuple[Tensor, Clipped]:
    """Returns m under the objective's clip."""
    clip, divergence, kl_coef = objective.clip, objective.divergence, constant(objective.kl_coef)
    if clip.type == "none":
        weight = plain_weight(terms, divergence=divergence, kl_coef=kl_coef)
        return weight, nothing_clipped(terms.ratio)
    low, high = constant(clip.low), constant(clip.high)
    match clip.type:
        case "truncate":
            return truncated_clip(terms, divergence=divergence, kl_coef=kl_coef, low=low, high=high)
        case "value":
            return value_clip(
                terms, divergence=divergence, kl_coef=kl_coef, low=low, high=high, dual=constant(clip.dual)
            )
        case "dual":
            rule = rpg_style_clip if clip.branch == "raw" else algorithm_2_clip
            return rule(
                terms,
                divergence=divergence,
                kl_coef=kl_coef,
                low=low,
                high=high,
                dual=constant(clip.dual),
                keep_divergence=clip.keep_divergence,
            )
        case never:
            assert_never(never)


def _clipped_loss(objective: RegularizedObjective, terms: Terms) -> tuple[Tensor, Clipped]:
    """Returns the differentiable loss of each entry under the objective's clip."""
    clip, divergence, kl_coef = objective.clip, objective.divergence, constant(objective.kl_coef)
    match clip.type:
        case "none":
            losses = differentiable_loss(terms, divergence=divergence, kl_coef=kl_coef)
            return losses, nothing_clipped(terms.ratio)
        case "dual":
            rule = dual_clip_loss if clip.branch == "raw" else algorithm_1_loss
            low, high = constant(clip.low), constant(clip.high)
            return rule(terms, divergence=divergence, kl_coef=kl_coef, low=low, high=high, dual=constant(clip.dual))
        case "truncate" | "value":
            raise ValueError(f"the schema refuses clip {clip.type} with the differentiable estimator")
        case never:
            assert_never(never)


def plain_weight(terms: Terms, *, divergence: Divergence, kl_coef: float) -> Tensor:
    """Returns m = w A + β K(w), the weight of `∇J = E_old[m ∇log π]` without a clip.

    Args:
        terms: terms of tokens or of whole responses.
        divergence: a key of `WEIGHTS`.
        kl_coef: β, the weight of the divergence, ≥ 0.
    Returns:
        One number per entry, reward units. Constant.
    Source: Zhang 2025, arXiv:2505.17508, Props F.1, F.3, F.4, F.5.
    """
    weight = _weight(terms, divergence, terms.log_ratio.detach())
    return terms.ratio * terms.advantages + kl_coef * weight


def _weight(terms: Terms, divergence: Divergence, log_ratio: Tensor) -> Tensor:
    """Returns K at a ratio, at the level of the terms."""
    if terms.state is not None:
        return rest_weight(divergence, log_ratio, terms)
    if terms.to_go:
        return to_go_weight(divergence, log_ratio, terms)
    return WEIGHTS[divergence](log_ratio, terms.log_reference)


def _divergence(terms: Terms, divergence: Divergence) -> Tensor:
    """Returns D, at the level of the terms."""
    if terms.state is not None:
        return rest_loss(divergence, terms)
    return to_go_loss(divergence, terms) if terms.to_go else LOSSES[divergence](terms)


def clamped_divergence_weight(
    terms: Terms, *, divergence: Divergence, kl_coef: float, low: float, high: float
) -> Tensor:
    """Returns β K(w̄), w̄ = w clamped to [1 − low, 1 + high].

    Returns: the divergence's part of the weight at the clamped ratio, one number per entry. Constant.
    """
    clamped = torch.log(clamp_ratio(terms.ratio, low=low, high=high))
    return kl_coef * _weight(terms, divergence, clamped)


def rpg_style_clip(
    terms: Terms,
    *,
    divergence: Divergence,
    kl_coef: float,
    low: float,
    high: float,
    dual: float,
    keep_divergence: bool,
) -> tuple[Tensor, Clipped]:
    """Returns RPG-Style Clip's weight: m = w A + β K(w̄) for active entries, 0 for the others.

    Active: A > 0 and w < 1 + high; or A ≤ 0 and 1 − low ≤ w < dual. w̄ is w clamped to [1 − low, 1 + high].

    Args:
        terms: terms of tokens or of whole responses.
        divergence: a key of `WEIGHTS`.    kl_coef: β, ≥ 0.
        low, high: margins around ratio 1.    dual: bound on the ratio if A ≤ 0, above 1.
        keep_divergence: whether an entry that is not active keeps β K(w̄).
    Returns:
        m, one number per entry, and the marks of the clip. Constant.
    Gradient:
        On policy exact in expectation. With β = 0 it is that of PPO's dual clip, entry by entry.
    Source: Zhang 2025, arXiv:2505.17508, public code: the raw advantage decides the side; the unclamped ratio
    weights the reward, the clamped ratio the divergence.
    """
    clipped = dual_clipped(terms.ratio, terms.advantages, low=low, high=high, dual=dual)
    divergence_part = clamped_divergence_weight(terms, divergence=divergence, kl_coef=kl_coef, low=low, high=high)
    inactive = divergence_part if keep_divergence else torch.zeros_like(divergence_part)
    return torch.where(clipped.any, inactive, terms.ratio * terms.advantages + divergence_part), clipped


def algorithm_2_clip(
    terms: Terms,
    *,
    divergence: Divergence,
    kl_coef: float,
    low: float,
    high: float,
    dual: float,
    keep_divergence: bool,
) -> tuple[Tensor, Clipped]:
    """Returns the weight of the paper's Algorithm 2: m = w A + β K(w) for active entries, 0 for the others.

    Active: m ≥ 0 and w < 1 + high; or m < 0 and 1 − low < w < dual. Here K uses the unclamped ratio, and the whole
    weight decides the side.

    Args and Returns: as `rpg_style_clip`; an entry that is not active keeps β K(w̄) with keep_divergence.
    Source: Zhang 2025, arXiv:2505.17508, Algorithm 2.
    """
    weight = plain_weight(terms, divergence=divergence, kl_coef=kl_coef)
    clipped = regularized_clipped(terms.ratio, weight, low=low, high=high, dual=dual)
    divergence_part = clamped_divergence_weight(terms, divergence=divergence, kl_coef=kl_coef, low=low, high=high)
    inactive = divergence_part if keep_divergence else torch.zeros_like(divergence_part)
    return torch.where(clipped.any, inactive, weight), clipped


def truncated_clip(
    terms: Terms, *, divergence: Divergence, kl_coef: float, low: float, high: float
) -> tuple[Tensor, Clipped]:
    """Returns the truncated weight: m = w̄ A + β K(w̄), w̄ = w clamped to [1 − low, 1 + high]; every entry counts.

    Returns: m, one number per entry, and the entries whose ratio was clamped. Constant.
    Source: Zhang 2025, arXiv:2505.17508, Remark F.2.
    """
    clamped = clamp_ratio(terms.ratio, low=low, high=high)
    divergence_part = clamped_divergence_weight(terms, divergence=divergence, kl_coef=kl_coef, low=low, high=high)
    never = torch.zeros_like(terms.ratio, dtype=torch.bool)
    held = Clipped(low=terms.ratio < clamped, high=terms.ratio > clamped, dual=never)
    return clamped * terms.advantages + divergence_part, held


def value_clip(
    terms: Terms, *, divergence: Divergence, kl_coef: float, low: float, high: float, dual: float
) -> tuple[Tensor, Clipped]:
    """Returns eq. 4.1's weight, with the value clipped: m = Â min(w, 1 + high) if Â ≥ 0, Â clamp(w, 1 − low, dual) if Â
    < 0.

    Every entry counts: the clip applies to the value that weights ∇log π, so every entry keeps a gradient. Within the
    bounds this is the m of `plain_weight`.

    Args: as in `rpg_style_clip`; dual bounds the ratio if Â < 0.
    Returns: m, one number per entry, and the entries whose ratio was clamped. Constant.
    Gradient:
        On policy exact in expectation, as no ratio is clamped there. The value is PPO's dual-clip surrogate of Â; its
        own gradient by the ratio is 0 for clamped ratios.
    Source: Zhang 2025, arXiv:2505.17508, eq. 4.1.
    """
    weight = plain_weight(terms, divergence=divergence, kl_coef=kl_coef)
    advantages = regularized_advantage(terms, divergence=divergence, kl_coef=kl_coef).detach()
    bounded = torch.where(advantages >= 0, terms.ratio.clamp(max=1 + high), terms.ratio.clamp(1 - low, dual))
    over = terms.ratio > bounded
    held = Clipped(low=terms.ratio < bounded, high=over & (advantages >= 0), dual=over & (advantages < 0))
    return torch.where(held.any, advantages * bounded, weight), held


def differentiable_loss(terms: Terms, *, divergence: Divergence, kl_coef: float) -> Tensor:
    """Returns −w A + β D, which is differentiated directly.

    Args:
        terms: terms of tokens or of whole responses.
        divergence: a key of `LOSSES`.    kl_coef: β, ≥ 0.
    Returns:
        One loss per entry, reward units.
    Gradient:
        −m ∇log π, entry by entry, with the m of `plain_weight`.
    Source: Zhang 2025, arXiv:2505.17508, Props 3.2, 3.6, E.1, E.3.
    """
    return -bounded_exp(terms.log_ratio) * terms.advantages + kl_coef * _divergence(terms, divergence)


def dual_clip_loss(
    terms: Terms, *, divergence: Divergence, kl_coef: float, low: float, high: float, dual: float
) -> tuple[Tensor, Clipped]:
    """Returns PPO's dual clip on −w A, plus β D without a clip.

    Args: as in `rpg_style_clip`, with the divergence a key of `LOSSES`.
    Returns: one loss per entry, reward units, and the marks of the clip.
    """
    reward = ppo_surrogate(bounded_exp(terms.log_ratio), terms.advantages, low=low, high=high, dual=dual)
    clipped = ppo_clipped(terms.ratio, terms.advantages, low=low, high=high, dual=dual)
    return reward + kl_coef * _divergence(terms, divergence), clipped


def algorithm_1_loss(
    terms: Terms, *, divergence: Divergence, kl_coef: float, low: float, high: float, dual: float
) -> tuple[Tensor, Clipped]:
    """Returns the loss of the paper's Algorithm 1: PPO's dual clip on −w Â, with the regularized advantage Â.

    Args and Returns: as `dual_clip_loss`; divergence reverse, unnormalized_reverse or none.
    Gradient:
        Through both factors: a clipped entry keeps the part through Â. For one token it differs from −m ∇log π by a
        multiple of w, whose expected gradient is 0: on policy it is exact in expectation, with a different variance.
    Source: Zhang 2025, arXiv:2505.17508, Algorithm 1.
    """
    advantages = regularized_advantage(terms, divergence=divergence, kl_coef=kl_coef)
    losses = ppo_surrogate(bounded_exp(terms.log_ratio), advantages, low=low, high=high, dual=dual)
    return losses, ppo_clipped(terms.ratio, advantages.detach(), low=low, high=high, dual=dual)


def regularized_advantage(terms: Terms, *, divergence: Divergence, kl_coef: float) -> Tensor:
    """Returns Â = m/w = A + β K(w)/w: A − β log r (unnormalized_reverse), A − β (log r + 1) (reverse), A (none).

    K is homogeneous in w and q, so K(w)/w is K at ratio 1 and at q/w = 1/r: no division by a ratio is needed.

    Returns: one number per entry, reward units. Differentiable.
    """
    if terms.state is not None:
        return terms.advantages + kl_coef * rest_weight(divergence, terms.log_ratio, terms, per_ratio=True)
    if terms.to_go:
        return terms.advantages + kl_coef * to_go_weight(divergence, terms.log_ratio, terms, per_ratio=True)
    log_ref_ratio = terms.log_ref_ratio
    return terms.advantages + kl_coef * WEIGHTS[divergence](torch.zeros_like(log_ref_ratio), -log_ref_ratio)
