"""One global denominator: neither microbatches nor ranks change the loss."""

import pytest
import torch

from rpg.objectives.aggregate import aggregate

LOSSES = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
WHOLE = {"num_tokens": 3, "num_sequences": 2, "max_response_length": 4}


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", 7 / 3),
        ("sequence_mean", (3 / 2 + 4 / 1) / 2),
        ("sequence_sum", 7 / 2),
        ("fixed_length", 7 / (2 * 4)),
    ],
)
def test_each_aggregation_by_hand(aggregation: str, expected: float) -> None:
    assert aggregate(LOSSES, MASK, aggregation=aggregation, **WHOLE).item() == pytest.approx(expected)
    parts = [aggregate(LOSSES[i : i + 1], MASK[i : i + 1], aggregation=aggregation, **WHOLE) for i in (0, 1)]
    assert sum(part.item() for part in parts) == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "fixed_length"])
def test_padding_has_no_gradient_whatever_stands_there(aggregation: str) -> None:
    losses = LOSSES.clone()
    losses[1, 2] = torch.nan
    losses.requires_grad_()
    aggregate(losses, MASK, aggregation=aggregation, **WHOLE).backward()
    assert losses.grad is not None
    assert (losses.grad != 0).tolist() == (MASK != 0).tolist()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "fixed_length"])
def test_a_microbatch_in_which_nothing_counts_weighs_nothing(aggregation: str) -> None:
    losses = LOSSES.clone().requires_grad_()
    loss = aggregate(losses, 0 * MASK, aggregation=aggregation, **WHOLE)
    loss.backward()
    assert loss.item() == 0
    assert losses.grad.abs().sum() == 0
