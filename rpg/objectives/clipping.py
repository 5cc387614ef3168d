"""Which tokens stop counting, and on which side. Margins around ratio 1, never bounds."""

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
    """No clip: False everywhere."""
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return Clipped(low=never, high=never, dual=never)


def dual_clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float) -> Clipped:
    """RPG-Style Clip: A > 0 counts while w < 1 + high; A <= 0 counts while 1 - low <= w < dual.

    Source: Zhang 2025, arXiv:2505.17508, public code; the branch is on the sign of the raw advantage.
    """
    positive = advantages > 0
    return Clipped(
        low=~positive & (ratio < 1 - low),
        high=positive & (ratio >= 1 + high),
        dual=~positive & (ratio >= dual),
    )


def regularized_clipped(ratio: Tensor, weight: Tensor, *, low: float, high: float, dual: float) -> Clipped:
    """The paper's Algorithm 2: the side is the sign of the whole weight w A + K(w), and the lower margin is closed.

    weight >= 0 counts while w < 1 + high; weight < 0 counts while 1 - low < w < dual.
    Source: Zhang 2025, arXiv:2505.17508, Algorithm 2 (its psi has the sign of the weight, since -log pi >= 0).
    """
    positive = weight >= 0
    return Clipped(
        low=~positive & (ratio <= 1 - low),
        high=positive & (ratio >= 1 + high),
        dual=~positive & (ratio >= dual),
    )


def ppo_clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float) -> Clipped:
    """Where PPO's dual clip takes the gradient away: A > 0 and w > 1 + high; A < 0 and w < 1 - low or w > dual."""
    positive, negative = advantages > 0, advantages < 0
    return Clipped(
        low=negative & (ratio < 1 - low),
        high=positive & (ratio > 1 + high),
        dual=negative & (ratio > dual),
    )


def clamp_ratio(ratio: Tensor, *, low: float, high: float) -> Tensor:
    """w held in [1 - low, 1 + high]."""
    return ratio.clamp(1 - low, 1 + high)


def ppo_surrogate(ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float = float("inf")) -> Tensor:
    """PPO's clipped surrogate with an optional bound on the ratio when A < 0, as a loss.

    -min(w A, clamp(w) A), and where A < 0 no more than -dual A. The gradient goes through the ratio, and through the
    advantage if that depends on the policy (the paper's Algorithm 1).

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
