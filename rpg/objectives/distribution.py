"""Divergences at a state that are summed over the vocabulary or over the reference's most likely tokens.

The sum has the exact gradient of the part of the divergence that it covers, in every state, whichever token was
sampled. The sampled token estimates only the rest: with `top_k` the tokens outside of the sum, with `level: to_go` the
divergence of later states.

Source: Amini 2025, arXiv:2504.10637; likeliest tokens, arXiv:2602.04417.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from specs.schema.objective import Divergence


@dataclass(frozen=True, slots=True)
class StateDivergence:
    """The divergence between policy and reference at the state before each token, over the summed tokens. Nats."""

    value: Tensor
    """The objective's divergence. Differentiable."""
    reverse: Tensor
    """Sum of π log r - π + π_ref, ≥ 0. Constant."""
    forward: Tensor
    """Sum of π - π_ref - π_ref log r, ≥ 0. Constant."""
    outside: Tensor
    """Whether the sampled token is outside the sum, bool. False everywhere if the sum is over the vocabulary."""

    def each(self, function: Callable[[Tensor], Tensor]) -> "StateDivergence":
        """Returns the results of a function on every tensor."""
        return StateDivergence(*map(function, (self.value, self.reverse, self.forward, self.outside)))

    def where(self, mask: Tensor, dtype: torch.dtype) -> "StateDivergence":
        """Returns the values in another type, with 0 at entries outside the mask."""

        def counted(values: Tensor) -> Tensor:
            return torch.where(mask, values.to(dtype), 0.0)

        reverse, forward = counted(self.reverse.detach()), counted(self.forward.detach())
        return StateDivergence(counted(self.value), reverse, forward, mask & self.outside)


def summed(divergence: Divergence, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns a divergence between policy and reference, summed over the last dimension.

    Args:
        divergence: a normalized one differs from the unnormalized one if the tokens are not the whole vocabulary.
        logprobs: log π of each token, nats. Differentiable.
        ref_logprobs: log π_ref of the same tokens. Constant.
    Returns:
        Nats, without the last dimension. Differentiable.
    """
    policy, reference = logprobs.exp(), ref_logprobs.detach().exp()
    log_ratio = logprobs - ref_logprobs.detach()
    match divergence:
        case "reverse":
            each = policy * log_ratio
        case "unnormalized_reverse":
            each = policy * log_ratio - policy + reference
        case "forward":
            each = -reference * log_ratio
        case "unnormalized_forward":
            each = policy - reference - reference * log_ratio
        case "jensen_shannon":
            each = (policy * log_share(log_ratio) + reference * log_share(-log_ratio)) / 2
        case "none":
            each = torch.zeros_like(log_ratio)
        case never:
            assert_never(never)
    return each.sum(-1)


def log_share(log_ratio: Tensor) -> Tensor:
    """Returns log(2 r / (1 + r)), the log-ratio of a policy to the mean of the two policies, given log r, the log-ratio
    of the two."""
    return torch.nn.functional.logsigmoid(log_ratio) + math.log(2)


def over_tokens(divergence: Divergence, logprobs: Tensor, ref_logprobs: Tensor, outside: Tensor) -> StateDivergence:
    """Returns the divergences at states, given the logprobs of the tokens to sum over, which are in the last dimension.

    Args: as in `summed`; outside: see `StateDivergence`.
    """
    with torch.no_grad():
        reverse = summed("unnormalized_reverse", logprobs, ref_logprobs)
        forward = summed("unnormalized_forward", logprobs, ref_logprobs)
    return StateDivergence(summed(divergence, logprobs, ref_logprobs), reverse, forward, outside)


def of_logits(
    divergence: Divergence, logits: Tensor, ref_logits: Tensor, *, top_k: int = 0, token_ids: Tensor | None = None
) -> StateDivergence:
    """Returns the divergences at states, given the whole logits of both policies.

    Args:
        logits: [batch, time, vocabulary], the policy's. Differentiable.
        ref_logits: the reference's, in the same shape. Constant.
        top_k: number of the reference's most likely tokens to sum over; 0 sums over the vocabulary.
        token_ids: sampled tokens [batch, time], int64; needed with `top_k`.
    """
    logprobs, ref_logprobs = torch.log_softmax(logits, -1), torch.log_softmax(ref_logits.detach(), -1)
    if not top_k:
        outside = torch.zeros(logits.shape[:-1], dtype=torch.bool, device=logits.device)
        return over_tokens(divergence, logprobs, ref_logprobs, outside)
    if token_ids is None:
        raise ValueError(
            "`kl: top_k` needs `token_ids` to find whether the sampled token is among the reference's likeliest"
        )
    likeliest, ids = ref_logprobs.topk(min(top_k, logits.shape[-1]), dim=-1)
    outside = (ids != token_ids[..., None]).all(-1)
    return over_tokens(divergence, logprobs.gather(-1, ids), likeliest, outside)
