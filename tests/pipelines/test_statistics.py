import doctest

import numpy as np
import pytest

from pipelines.report import statistics
from pipelines.report.statistics import (
    bootstrap_difference,
    bootstrap_mean,
    paired_bootstrap,
    seed_difference,
    seed_mean,
)


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(statistics).failed == 0


def test_a_gain_that_every_problem_shows_is_certain() -> None:
    before = np.tile([0.1, 0.5, 0.6], (2, 1))
    interval = paired_bootstrap(before, before + 0.25)
    assert interval.value == pytest.approx(0.25)
    assert (interval.low, interval.high) == pytest.approx((0.25, 0.25))
    assert interval.excludes(0)


def test_pairing_makes_the_interval_narrower_than_two_groups_apart() -> None:
    rng = np.random.default_rng(0)
    hard = rng.random(200)
    before, after = hard, np.clip(hard + 0.05 * rng.random(200), 0, 1)
    paired = paired_bootstrap(before, after)
    alone = bootstrap_mean(after)
    assert paired.high - paired.low < (alone.high - alone.low) / 5


def test_one_row_before_serves_every_seed_after() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.random(50), rng.random((3, 50))
    assert paired_bootstrap(before, after) == paired_bootstrap(np.tile(before, (3, 1)), after)


def test_the_interval_of_one_seed_is_that_of_the_normal_approximation() -> None:
    # 400 problems of a fair coin: standard error 0.5 / sqrt(400) = 0.025, so 1.96 of it is 0.049 to each side.
    interval = bootstrap_mean([0.0, 1.0] * 200)
    assert interval.low == pytest.approx(0.451, abs=0.004)
    assert interval.high == pytest.approx(0.549, abs=0.004)


def test_seeds_that_disagree_widen_the_interval() -> None:
    problems = np.random.default_rng(0).random(200)
    agree = paired_bootstrap(np.zeros(200), np.tile(problems, (3, 1)))
    disagree = paired_bootstrap(np.zeros(200), problems + np.array([[-0.2], [0.0], [0.2]]))
    assert disagree.value == pytest.approx(agree.value)
    assert disagree.high - disagree.low > 2 * (agree.high - agree.low)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = sum(
        not bootstrap_mean(rng.binomial(8, 0.4, 60) / 8, resamples=500, seed=trial).excludes(0.4)
        for trial in range(300)
    )
    assert 0.90 <= hits / 300 <= 0.98


def test_chunks_change_nothing_but_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(0).random((2, 40))
    whole = bootstrap_mean(scores, resamples=4000)
    monkeypatch.setattr(statistics, "_CHUNK", 40 * 100)
    chunked = bootstrap_mean(scores, resamples=4000)
    assert (chunked.low, chunked.high) == pytest.approx((whole.low, whole.high), abs=0.01)


def test_the_difference_of_two_groups_pairs_problems_and_not_seeds() -> None:
    problems = np.random.default_rng(0).random(100)
    shift = bootstrap_difference(np.tile(problems, (2, 1)), np.tile(problems + 0.1, (3, 1)))
    assert (shift.low, shift.value, shift.high) == pytest.approx((0.1, 0.1, 0.1))


def test_seed_intervals_are_students_and_welchs() -> None:
    assert np.isnan(seed_mean([3.0]).low)
    assert np.isnan(seed_difference([3.0], [1.0, 2.0]).high)
    # Equal sizes and variances (1): Welch has 4 degrees of freedom, t = 2.776, standard error sqrt(2 / 3) = 0.8165.
    interval = seed_difference([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    assert interval.value == 3.0
    assert interval.low == pytest.approx(3.0 - 2.776 * 0.8165, abs=1e-3)
    assert seed_difference([1.0, 1.0], [2.0, 2.0]).low == 1.0


@pytest.mark.parametrize("scores", [[], [[]], [0.1, float("nan")], np.zeros((2, 2, 2))])
def test_scores_that_mean_nothing_are_refused(scores: object) -> None:
    with pytest.raises(ValueError, match="scores"):
        bootstrap_mean(scores)  # type: ignore[arg-type]


def test_problems_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="do not pair"):
        paired_bootstrap([0.0, 1.0], [0.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="same problems"):
        bootstrap_difference([0.0, 1.0], [0.0, 1.0, 1.0])
