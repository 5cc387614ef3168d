"""The reward's part of the losses of rival objectives. The penalty on the divergence, which they share, is in `kl`.

The expected gradient of each is that of the expected reward if the policy is the sampler, since then every ratio is 1
and nothing is clipped. Off policy the clip biases it, and ratios of single tokens ignore the distribution of states.
"""

import torch
from torch import Tensor

from rpg.objectives.clipping import Clipped, ppo_clipped, ppo_surrogate
from rpg.objectives.registry import equation
from rpg.objectives.terms import Terms, bounded_exp
from specs.schema.objective import Cispo, ClippedPublishedObjective
from specs.schema.schedule import constant


@equation.register
def clipped_surrogate(objective: ClippedPublishedObjective, terms: Terms) -> tuple[Tensor, Clipped]:
    """−min(w A, w̄ A)

    w̄ is w clamped to [1 − low, 1 + high]; for A < 0 the loss is at most −dual A. The ratio is the token's (PPO, GRPO,
    DAPO, Dr.GRPO, REINFORCE++), the whole response's (RLOO, as in TRL) or its geometric mean (GSPO).

    Source: Schulman 2017, arXiv:1707.06347, eq. 7; GSPO, Zheng 2025, arXiv:2507.18071, eq. 5.
    """
    clip = objective.clip
    low, high, dual = constant(clip.low), constant(clip.high), constant(clip.dual) or float("inf")
    losses = ppo_surrogate(bounded_exp(terms.log_ratio), terms.advantages, low=low, high=high, dual=dual)
    return terms.per_token(losses), ppo_clipped(terms.ratio, terms.advantages, low=low, high=high, dual=dual)


@equation.register
def capped_reinforce(objective: Cispo, terms: Terms) -> tuple[Tensor, Clipped]:
    """−SG(min(w, max_ratio)) A log π

    A token above the bound keeps the bound's weight, and the mark `high`.

    Source: MiniMax 2025, arXiv:2506.13585, eq. 4. Differs: no bound below, as the paper trains it.
    """
    most = constant(objective.max_ratio)
    losses = -terms.ratio.clamp(max=most) * terms.advantages * terms.logprobs
    never = torch.zeros_like(terms.ratio, dtype=torch.bool)
    return losses, Clipped(low=never, high=terms.ratio > most, dual=never)
