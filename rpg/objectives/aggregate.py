"""Reduces token losses and a mask to the loss of an update. No other module divides a loss."""

from typing import assert_never

import torch
from torch import Tensor

from specs.schema.objective import Aggregation


def aggregate(
    losses: Tensor,
    response_mask: Tensor,
    *,
    aggregation: Aggregation,
    num_tokens: float,
    num_sequences: float,
    max_response_length: int,
) -> Tensor:
    """Returns this microbatch's part of the update's loss. The parts of all microbatches and ranks add up to the loss.

    token_mean: sum / num_tokens; sequence_mean: the mean over the update's responses of their token means;
    sequence_sum: sum / num_sequences; fixed_length: sum / (num_sequences * max_response_length).

    Args:
        losses: [batch, time], from `token_losses`.
        response_mask: [batch, time], 1 on tokens that count. A response without any counts as a loss of 0.
        num_tokens: response tokens of the whole update, over all microbatches and ranks.
        num_sequences: responses of the whole update, over all microbatches and ranks.
        max_response_length: tokens; only fixed_length uses it.
    Returns:
        Scalar, to be summed (not averaged) over microbatches and ranks. 0, with a gradient of 0, if no token counts.
    Source: lengths and their bias, Liu 2025, arXiv:2503.20783; token mean, Yu 2025, arXiv:2503.14476.
    """
    mask = response_mask != 0
    counted = torch.where(mask, losses, 0.0)
    match aggregation:
        case "token_mean":
            return counted.sum() / max(num_tokens, 1)
        case "sequence_mean":
            lengths = mask.sum(-1).clamp(min=1)
            return (counted.sum(-1) / lengths).sum() / max(num_sequences, 1)
        case "sequence_sum":
            return counted.sum() / max(num_sequences, 1)
        case "fixed_length":
            return counted.sum() / (max(num_sequences, 1) * max_response_length)
        case never:
            assert_never(never)
