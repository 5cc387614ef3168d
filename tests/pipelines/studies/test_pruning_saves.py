"""Pruning with promotion over simulated learning curves: what `benchmarks/pruning.py` prints, small."""

import pytest

from benchmarks.pruning import compare


@pytest.mark.parametrize(
    ("steps", "ladder", "eta"), [(200, (25, 50, 100), 2), (24, (6, 12), 3), (24, (4, 12), 3)], ids=str
)
def test_successive_halving_comes_to_the_unpruned_best_at_half_of_its_steps(
    steps: int, ladder: tuple[int, ...], eta: int
) -> None:
    figures = compare(24, steps, {"type": "asha", "rungs": ladder, "eta": eta}, studies=60)
    assert figures.share < 0.5
    assert figures.reached > 0.9
    assert figures.loss - figures.loss_unpruned < 0.01


def test_halving_from_a_quarter_on_takes_more_than_half() -> None:
    """Trials that are promoted early, and found not to be among the best later, come on top of the halves."""
    figures = compare(24, 24, {"type": "asha", "rungs": (6, 12), "eta": 2}, studies=60)
    assert 0.5 < figures.share < 0.6


def test_without_pruning_all_steps_are_trained_and_nothing_is_lost() -> None:
    figures = compare(8, 24, {"type": "patient", "rungs": (6, 12), "patience": 2}, studies=20)
    assert figures.share == 1
    assert figures.loss == figures.loss_unpruned
