"""Clips of the importance ratio: the entries that they mark, and on which side. Parameters are margins around ratio 1.

`regularized` and `rivals` define the weight of a marked entry.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Clipped:
    """The marks of a clip, each bool in the shape of the ratio. For each entry at most one of the three is True."""

    low: Tensor
    """Ratio below the lower margin."""
    high: Tensor
    """Ratio above the upper margin."""
    dual: Tensor
    """Ratio at or above the bound for negative advantages."""

    @property
    def any(self) -> Tensor:
        """Returns whether any of the three marks an entry."""
        return self.low | self.high | self.dual


def nothing_clipped(ratio: Tensor) -> Clipped:
    """Returns marks that are False everywhere."""
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return Clipped(low=never, high=never, dual=never)


def dual_clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float) -> Clipped:
    """Returns RPG-Style Clip's marks: an entry is active iff A > 0 and w < 1 + high, or A ≤ 0 and 1 − low ≤ w < dual.

    Args:
        ratio: w, constant.
        advantages: raw A, in the same shape.
        low, high: margins.    dual: bound on the ratio if A ≤ 0.
    Returns:
        Marks of the entries that are not active.
    Source: Zhang 2025, arXiv:2505.17508, public code.
    """
    positive = advantages > 0
    return Clipped(
        low=~positive & (ratio < 1 - low),
        high=positive & (ratio >= 1 + high),
        dual=~positive & (ratio >= dual),
    )


def regularized_clipped(ratio: Tensor, weight: Tensor, *, low: float, high: float, dual: float) -> Clipped:
    """Returns Algorithm 2's marks: active iff m ≥ 0 and w < 1 + high, or m < 0 and 1 − low < w < dual.

    Args:
        ratio: w, constant.
        weight: m = w A + K(w), in the same shape; the algorithm's ψ has its sign, since −log π ≥ 0.
        low, high: margins.    dual: bound on the ratio if m < 0.
    Returns:
        Marks of the entries that are not active.
    Source: Zhang 2025, arXiv:2505.17508, Algorithm 2.
    """
    positive = weight >= 0
    return Clipped(
        low=~positive & (ratio <= 1 - low),
        high=positive & (ratio >= 1 + high),
        dual=~positive & (ratio >= dual),
    )


def ppo_clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float) -> Clipped:
    """Returns PPO's marks: A > 0 and w > 1 + high; A < 0 and w < 1 − low or w > dual. There `ppo_surrogate` has no
    gradient.

    Args and Returns: as in `dual_clipped`. Entries with A = 0 are not marked.
    """
    positive, negative = advantages > 0, advantages < 0
    return Clipped(
        low=negative & (ratio < 1 - low),
        high=positive & (ratio > 1 + high),
        dual=negative & (ratio > dual),
    )


def clamp_ratio(ratio: Tensor, *, low: float, high: float) -> Tensor:
    """Returns w̄, which is w clamped to [1 − low, 1 + high]."""
    return ratio.clamp(1 - low, 1 + high)


def ppo_surrogate(ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float = float("inf")) -> Tensor:
    """Returns PPO's clipped surrogate: −min(w A, w̄ A), and for A < 0 at most −dual A.

    Args:
        ratio: w. Differentiable.
        advantages: A. Differentiable if it depends on the policy, as in the paper's Algorithm 1.
        low, high: margins.    dual: bound on the ratio if A < 0.
    Returns:
        Losses in the shape of the ratio, reward units.
    Gradient:
        On policy −A ∇log π. Zero through the ratio for entries that `ppo_clipped` marks.
    Source: Schulman 2017, arXiv:1707.06347, eq. 7; dual clip, Ye 2020, arXiv:1912.09729, eq. 5; two margins, Yu 2025,
    arXiv:2503.14476.
    Example: ratio 2 with A = 1 is clamped to 1 + high.
        >>> one = torch.ones(1)
        >>> round(ppo_surrogate(2 * one, one, low=0.2, high=0.28).item(), 2)
        -1.28
    """
    clipped = clamp_ratio(ratio, low=low, high=high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if dual == float("inf"):
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
