"""Which problem comes next: shuffled, or by how often it has been solved."""

import numpy as np
import pytest

from rpg.data.order import OrderByDifficulty, PromptOrder, order_of
from specs.schema.data import DifficultyOrder, ShuffledOrder


def by_difficulty(problems: int = 12, **options: float) -> OrderByDifficulty:
    order = order_of(DifficultyOrder(**options), problems, seed=3)
    assert isinstance(order, OrderByDifficulty)
    return order


def test_untried_problems_come_first_each_once() -> None:
    order = by_difficulty()
    first = order.take(8)
    order.note(first, [0.0] * 8)
    assert sorted(first + order.take(4)) == list(range(12))


def test_half_of_the_prompts_are_those_solved_now_and_then() -> None:
    order = by_difficulty(40)
    order.note(range(20), [0.0, 0.5, 1.0, 0.25] * 5)
    drawn = order.take(12)
    medium = {problem for problem in range(20) if problem % 2}
    assert sum(problem in medium for problem in drawn) == 6
    assert not set(drawn) & (set(range(20)) - medium), "problems that are all right or all wrong wait for untried ones"


def test_of_the_medium_ones_those_tried_longest_ago_come_first() -> None:
    order = by_difficulty(6, explore=0.01)
    order.note([0, 1, 2], [0.5] * 3)
    order.note([3, 4, 5], [0.5] * 3)
    assert set(order.take(3)) == {0, 1, 2}


def test_where_the_medium_ones_run_out_others_take_their_places_and_none_comes_twice() -> None:
    order = by_difficulty(10, explore=0.1)
    order.note([7], [0.5])
    drawn = order.take(10)
    assert drawn[0] == 7
    assert sorted(drawn) == list(range(10))
    assert len(order.take(25)) == 25, "more than there are: then they come again"


def test_a_problem_that_is_learnt_leaves_the_pool() -> None:
    order = by_difficulty(4, explore=0.01, memory=0.5)
    order.note([0, 1], [0.5, 0.5])
    order.note([0, 0, 0], [1.0, 1.0, 1.0])  # 0.75, 0.875, 0.9375
    assert order.take(2)[0] == 1
    assert order.take(1) == [1]


def test_an_order_that_is_restored_goes_on_as_it_would_have() -> None:
    order, other = by_difficulty(30), by_difficulty(30)
    rates = np.random.default_rng(0)
    for _ in range(4):
        order.note(drawn := order.take(8), rates.integers(0, 5, len(drawn)) / 4)
    other.restore(order.state())
    other.position = order.position
    assert other.take(20) == order.take(20)
    other.restore(None)
    other.position = 0
    assert other.take(8) == by_difficulty(30).take(8)


def test_the_shuffled_order_hears_nothing_and_keeps_nothing() -> None:
    order = order_of(ShuffledOrder(), 5, seed=1)
    first = order.take(5)
    order.note(first, [1.0] * 5)
    assert order.state() is None
    assert PromptOrder(5, seed=1).take(10)[:5] == first
    assert sorted(order.take(5)) == list(range(5))


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.5), (0.9, 0.1)])
def test_pools_without_a_middle_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="hard_below must be less than easy_above"):
        DifficultyOrder(hard_below=low, easy_above=high)
