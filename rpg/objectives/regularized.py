"""Regularized policy gradient: expected reward minus beta times a divergence from the reference, two estimators, with or without a clip.

Leaf functions on `Terms`; every one returns an entry's value, [B, T] at token level, [B, 1] at sequence level.
Source: Zhang 2025, arXiv:2505.17508; sampler and reference may differ here.
"""

import torch
from torch import Tensor

from rpg.objectives.clipping import clamp_ratio, dual_clipped, ppo_surrogate
from rpg.objectives.divergence import LOSSES, WEIGHTS
from rpg.objectives.terms import Terms


def plain_weight(terms: Terms, *, divergence: str, kl_coef: float) -> Tensor:
    """m = w A + K(w) of `grad J = E_old[m grad log pi]`. Constant."""
    log_ratio = terms.log_ratio.detach()
    return terms.ratio.detach() * terms.advantages + kl_coef * WEIGHTS[divergence](log_ratio, terms.log_reference)


def dual_clip_weight(terms: Terms, *, divergence: str, kl_coef: float, low: float, high: float, dual: float) -> Tensor:
    """RPG-Style Clip: A w + K(clamp(w)) where the entry is active, 0 where `dual_clipped` says it is not. Constant."""
    ratio = terms.ratio.detach()
    clamped = torch.log(clamp_ratio(ratio, low=low, high=high))
    weight = ratio * terms.advantages + kl_coef * WEIGHTS[divergence](clamped, terms.log_reference)
    clipped = dual_clipped(ratio, terms.advantages, low=low, high=high, dual=dual)
    return torch.where(clipped.any, 0.0, weight)


def reinforce_loss(terms: Terms, weight: Tensor) -> Tensor:
    """-SG(m) log pi, [B, T]: a response's tokens sum to -SG(m) log pi(response)."""
    return -weight.detach() * terms.logprobs


def differentiable_loss(terms: Terms, *, divergence: str, kl_coef: float) -> Tensor:
    """-w A + beta D, differentiated as it stands."""
    return -terms.ratio * terms.advantages + kl_coef * LOSSES[divergence](terms)


def dual_clip_differentiable_loss(
    terms: Terms, *, divergence: str, kl_coef: float, low: float, high: float, dual: float
) -> Tensor:
    """PPO's dual clip on the reward part, the divergence added unclipped."""
    reward = ppo_surrogate(terms.ratio, terms.advantages, low=low, high=high, dual=dual)
    return reward + kl_coef * LOSSES[divergence](terms)
