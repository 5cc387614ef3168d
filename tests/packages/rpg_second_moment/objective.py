"""An objective that looks at a whole pass: it drops the tokens that moved most, until the second moment is bounded."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rpg.objectives import Clipped, PackagedObjective, Terms


class SecondMoment(PackagedObjective):
    """Importance sampling whose second moment of log w is bounded over a pass, after M2PO, arXiv:2510.01161."""

    most: float = Field(0.04, gt=0)
    """Largest mean of (log w)² over the tokens of a pass that are kept, nats²."""

    @property
    def exact(self) -> Literal["on_policy"]:
        """The policy is the sampler: every ratio is 1, and no token is dropped."""
        return "on_policy"

    def losses(self, terms: Terms) -> tuple[Tensor, Clipped]:
        squares = terms.log_ratio.detach().square()
        ascending = squares[terms.response_mask].sort().values
        means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squares.device)
        kept = ascending[means <= self.most]
        dropped = squares > (kept[-1] if len(kept) else -1.0)
        never = torch.zeros_like(dropped)
        low, high = dropped & (terms.ratio < 1), dropped & (terms.ratio >= 1)
        weight = torch.where(dropped, 0.0, terms.ratio * terms.advantages)
        return -weight * terms.logprobs, Clipped(low=low, high=high, dual=never)
