"""The PPO family: a clipped surrogate of the reward, the penalty apart from it.

The expected gradient is that of the expected reward where the policy is the sampler, since there every ratio is 1 and
nothing is clipped; off policy the clip biases it, and single-token ratios leave out how the prefix came about.
"""

import torch
from torch import Tensor

from rpg.objectives.clipping import Clipped, nothing_clipped, ppo_surrogate
from rpg.objectives.terms import Terms


def clipped_loss(terms: Terms, *, low: float, high: float, dual: float) -> Tensor:
    """PPO's clipped surrogate on the terms' ratio: of the token (PPO, GRPO, DAPO, Dr.GRPO, REINFORCE++), of the whole
    response (RLOO as TRL has it) or its geometric mean (GSPO). dual 0: no bound on the ratio when A < 0.

    Source: Schulman 2017, arXiv:1707.06347, eq. 7; GSPO, Zheng 2025, arXiv:2507.18071, eq. 5.
    """
    surrogate = ppo_surrogate(terms.ratio, terms.advantages, low=low, high=high, dual=dual or float("inf"))
    return terms.per_token(surrogate)


def capped_loss(terms: Terms, *, max_ratio: float) -> Tensor:
    """CISPO: -SG(min(w, max_ratio)) A log pi; a token over the bound keeps the bound's weight.

    Source: MiniMax 2025, arXiv:2506.13585, eq. 4. Differs: no bound below, as the paper trains it.
    """
    return -terms.ratio.detach().clamp(max=max_ratio) * terms.advantages * terms.logprobs


def over_cap(ratio: Tensor, *, max_ratio: float) -> Clipped:
    """Where CISPO holds the ratio."""
    never = nothing_clipped(ratio)
    return Clipped(low=never.low, high=ratio > max_ratio, dual=torch.zeros_like(never.dual))
