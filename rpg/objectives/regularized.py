"""Regularized policy gradient: expected reward minus beta times a divergence from the reference.

Leaf functions on `Terms`; those of weights return an entry's value, [B, T] at token level, [B, 1] at sequence level.
Source: Zhang 2025, arXiv:2505.17508. Differs: sampler and reference may be two policies.
"""

import torch
from torch import Tensor

from rpg.objectives.clipping import clamp_ratio, ppo_surrogate
from rpg.objectives.divergence import LOSSES, WEIGHTS
from rpg.objectives.terms import Terms


def plain_weight(terms: Terms, *, divergence: str, kl_coef: float) -> Tensor:
    """m = w A + K(w) of `grad J = E_old[m grad log pi]`. Constant."""
    log_ratio = terms.log_ratio.detach()
    return terms.ratio.detach() * terms.advantages + kl_coef * WEIGHTS[divergence](log_ratio, terms.log_reference)


def clamped_divergence_weight(terms: Terms, *, divergence: str, kl_coef: float, low: float, high: float) -> Tensor:
    """K at the clamped ratio. Constant."""
    clamped = torch.log(clamp_ratio(terms.ratio.detach(), low=low, high=high))
    return kl_coef * WEIGHTS[divergence](clamped, terms.log_reference)


def truncated_weight(terms: Terms, *, divergence: str, kl_coef: float, low: float, high: float) -> Tensor:
    """A clamp(w) + K(clamp(w)): every token counts. Constant. The paper's Remark F.2."""
    clamped = clamp_ratio(terms.ratio.detach(), low=low, high=high)
    divergence_part = clamped_divergence_weight(terms, divergence=divergence, kl_coef=kl_coef, low=low, high=high)
    return clamped * terms.advantages + divergence_part


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


def regularized_advantage(terms: Terms, *, divergence: str, kl_coef: float) -> Tensor:
    """The paper's A-hat, differentiable: A - beta log r (unnormalized_reverse), A - beta (log r + 1) (reverse), A
    (none)."""
    if divergence == "none":
        return terms.advantages
    return terms.advantages - kl_coef * (terms.log_ref_ratio + (1.0 if divergence == "reverse" else 0.0))


def algorithm_1_loss(terms: Terms, *, divergence: str, kl_coef: float, low: float, high: float, dual: float) -> Tensor:
    """PPO's dual clip on the regularised advantage, for the reverse divergences; the gradient goes through both
    factors.

    Its derivative for one token differs from the weights of the contract by a multiple of w, whose expected gradient
    is 0: on policy it is exact in expectation, with another variance. A clipped token keeps the gradient through the
    advantage.
    Source: Zhang 2025, arXiv:2505.17508, Algorithm 1.
    """
    advantages = regularized_advantage(terms, divergence=divergence, kl_coef=kl_coef)
    return ppo_surrogate(terms.ratio, advantages, low=low, high=high, dual=dual)
