"""Clips of the importance ratio: which entries stop counting, on which side. Margins around ratio 1, never bounds.

What becomes of a marked entry's weight stands in `regularized` and `rivals`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Clipped:
    """Where a clip acts, bool, of the shape of the ratio; at most one of the three holds for an entry."""

    low: Tensor
    """Ratio under the lower margin."""
    high: Tensor
    """Ratio over the upper margin."""
    dual: Tensor
    """Ratio at the bound for negative advantages or over it."""

    @property
    def any(self) -> Tensor:
        """Where any of the three acts."""
        return self.low | self.high | self.dual


def nothing_clipped(ratio: Tensor) -> Clipped:
    """False everywhere."""
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return Clipped(low=never, high=never, dual=never)


def dual_clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float) -> Clipped:
    """RPG-Style Clip's marks: an entry is active iff A > 0 and w < 1 + high, or A ≤ 0 and 1 − low ≤ w < dual.

    Args:
        ratio: w, constant.
        advantages: raw A, of the same shape.
        low, high: margins.    dual: bound on the ratio where A ≤ 0.
    Returns:
        Where the entry is not active.
    Source: Zhang 2025, arXiv:2505.17508, public code.
    """
    positive = advantages > 0
    return Clipped(
        low=~positive & (ratio < 1 - low),
        high=positive & (ratio >= 1 + high),
        dual=~positive & (ratio >= dual),
    )


def regularized_clipped(ratio: Tensor, weight: Tensor, *, low: float, high: float, dual: float) -> Clipped:
    """Algorithm 2's marks: active iff m ≥ 0 and w < 1 + high, or m < 0 and 1 − low < w < dual.

    Args:
        ratio: w, constant.
        weight: m = w A + K(w), of the same shape; the algorithm's ψ has its sign, since −log π ≥ 0.
        low, high: margins.    dual: bound on the ratio where m < 0.
    Returns:
        Where the entry is not active.
    Source: Zhang 2025, arXiv:2505.17508, Algorithm 2.
    """
    positive = weight >= 0
    return Clipped(
        low=~positive & (ratio <= 1 - low),
        high=positive & (ratio >= 1 + high),
        dual=~positive & (ratio >= dual),
    )


def ppo_clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float) -> Clipped:
    """PPO's marks, where `ppo_surrogate` has no gradient: A > 0 and w > 1 + high; A < 0 and w < 1 − low or w > dual.

    Args and Returns: as `dual_clipped`. Where A = 0 nothing is marked.
    """
    positive, negative = advantages > 0, advantages < 0
    return Clipped(
        low=negative & (ratio < 1 - low),
        high=positive & (ratio > 1 + high),
        dual=negative & (ratio > dual),
    )


def clamp_ratio(ratio: Tensor, *, low: float, high: float) -> Tensor:
    """w̄, which is w held in [1 − low, 1 + high]."""
    return ratio.clamp(1 - low, 1 + high)


def ppo_surrogate(ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float = float("inf")) -> Tensor:
    """PPO's clipped surrogate: −min(w A, w̄ A), and where A < 0 at most −dual A.

    Args:
        ratio: w. Differentiable.
        advantages: A. Differentiable where it depends on the policy, as in the paper's Algorithm 1.
        low, high: margins.    dual: bound on the ratio where A < 0.
    Returns:
        Losses of the shape of the ratio, reward units.
    Gradient:
        On policy −A ∇log π. Zero through the ratio where `ppo_clipped` marks an entry.
    Source: Schulman 2017, arXiv:1707.06347, eq. 7; dual clip, Ye 2020, arXiv:1912.09729, eq. 5; two margins, Yu 2025,
    arXiv:2503.14476.
    Example: ratio 2 with A = 1 is held at 1 + high.
        >>> one = torch.ones(1)
        >>> round(ppo_surrogate(2 * one, one, low=0.2, high=0.28).item(), 2)
        -1.28
    """
    clipped = clamp_ratio(ratio, low=low, high=high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if dual == float("inf"):
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
