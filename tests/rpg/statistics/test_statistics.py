"""Intervals over seeds and problems: worked numbers, required invariances, and coverage."""

import doctest
import math

import numpy as np
import pytest
from scipy import stats

from pipelines.report import statistics as answers
from rpg.statistics import (
    NEW_SEEDS,
    THESE_WEIGHTS,
    Interval,
    arms_against_first,
    comparison,
    factors,
    gain_interval,
    intervals,
    mean_interval,
    seed_difference,
    seed_mean,
    spread_of,
    variance,
    verdict,
)


def test_the_examples_in_the_docstrings_hold() -> None:
    for module in (comparison, factors, intervals, variance):
        assert doctest.testmod(module).failed == 0


def test_reports_and_notebooks_have_the_same_intervals_as_evaluation() -> None:
    assert answers.mean_interval is mean_interval
    assert answers.arms_against_first is arms_against_first
    assert answers.verdict is verdict


def test_a_gain_that_every_problem_shows_alike_has_the_width_of_one_problem_more() -> None:
    # No variance in the table; three problems moved, so one more may have by 1/4: 1/4 / (3 + 1) / (3 + 1) = 1/64.
    before = np.tile([0.1, 0.5, 0.6], (2, 1))
    interval = gain_interval(before, before + 0.25)
    assert interval.value == pytest.approx(0.25)
    assert interval.high - interval.value == pytest.approx(stats.t.ppf(0.975, 2) / 64)


def test_a_gain_of_figures_that_are_no_shares_is_certain_where_all_problems_agree() -> None:
    before = np.tile([1.0, 5.0, 6.0], (2, 1))
    interval = gain_interval(before, before + 2.5)
    assert (interval.low, interval.high) == pytest.approx((2.5, 2.5))


def test_the_variance_of_a_gain_has_a_part_of_seeds_and_one_of_problems() -> None:
    # Gains of two seeds on two problems: [[0, 2], [2, 6]]. Seeds' means 1 and 4: s^2 = 4.5, A = 4.5 / 2 = 2.25.
    # Problems' means 1 and 4: B = 4.5 / 2 = 2.25. Residuals are +-1/2: mean square 4 (1/4) / 1 = 1, E = 1 / 4.
    # Both parts have one degree of freedom, so there is one factor, t(0.975, 1) = 12.7; V = 2.25 + 2.25 - 0.25 = 4.25.
    interval = gain_interval(np.zeros((2, 2)), [[0.0, 2.0], [2.0, 6.0]])
    half = stats.t.ppf(0.975, 1) * math.sqrt(4.25)
    assert interval.value == 2.5
    assert (interval.low, interval.high) == pytest.approx((2.5 - half, 2.5 + half), rel=1e-9)


def test_the_factor_of_few_seeds_is_on_a_share_of_their_variance() -> None:
    # Three problems now: seeds' means 1 and 4, A = 2.25; problems' means 1, 4, 2.5: B = 2.25 / 3 = 0.75. Residuals are
    # +-1/2 on the first two problems and 0 on the third: mean square 1 / 2, E = 1 / 12; V = 2.25 + 0.75 - 1/12.
    interval = gain_interval(np.zeros((2, 3)), [[0.0, 2.0, 1.0], [2.0, 6.0, 4.0]])
    seeds, problems = stats.t.ppf(0.975, [1, 2])
    squared = problems**2 * (3 - 1 / 12) + (seeds**2 - problems**2) * 2.25**2 / (2.25 + 1 / 12 + 0.75 / 4)
    assert interval.high - interval.value == pytest.approx(math.sqrt(squared), rel=1e-9)


def test_pairing_makes_the_interval_narrower_than_two_groups_apart() -> None:
    rng = np.random.default_rng(0)
    hard = rng.random(200)
    before, after = hard, np.clip(hard + 0.05 * rng.random(200), 0, 1)
    paired, alone = gain_interval(before, after), mean_interval(after)
    assert paired.high - paired.low < (alone.high - alone.low) / 5


def test_one_row_before_serves_every_seed_after() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.random(50), rng.random((3, 50))
    assert gain_interval(before, after) == gain_interval(np.tile(before, (3, 1)), after)


def test_the_interval_of_one_seed_is_that_of_the_normal_approximation() -> None:
    # 400 problems of a fair coin: standard error 0.5 / sqrt(400) = 0.025, so 1.96 of it is 0.049 to each side.
    interval = mean_interval([0.0, 1.0] * 200)
    assert interval.low == pytest.approx(0.451, abs=0.002)
    assert interval.high == pytest.approx(0.549, abs=0.002)


def test_seeds_that_disagree_widen_the_interval() -> None:
    problems = np.random.default_rng(0).random(200)
    agree = gain_interval(np.zeros(200), np.tile(problems, (3, 1)))
    disagree = gain_interval(np.zeros(200), problems + np.array([[-0.2], [0.0], [0.2]]))
    assert disagree.value == pytest.approx(agree.value)
    assert disagree.high - disagree.low > 2 * (agree.high - agree.low)


def test_a_spread_pooled_with_other_arms_narrows_the_interval_of_two_seeds() -> None:
    rng = np.random.default_rng(0)
    arms = [rng.random((2, 300)) + 0.05 * rng.standard_normal((2, 1)) for _ in range(6)]
    pooled = spread_of(arms)
    assert pooled.freedom == 6
    widths = [[i.high - i.low for i in (mean_interval(a - 1), mean_interval(a - 1, spread=pooled))] for a in arms]
    assert np.mean(widths, axis=0)[1] < np.mean(widths, axis=0)[0] / 1.5


def test_a_pooled_spread_never_hides_that_an_arms_own_seeds_differ_more() -> None:
    problems = np.random.default_rng(0).random(300) - 1
    calm, wild = np.tile(problems, (2, 1)), problems + np.array([[-0.2], [0.2]])
    pooled = spread_of([calm] * 5 + [wild])
    # s^2 = 0.08 of the wild one, so A = 0.04: at least t(0.975, 6) = 2.45 times 0.2, where the pooled 0.0067 has 0.08.
    interval = mean_interval(wild, spread=pooled)
    assert interval.high - interval.value > 0.45
    # (0.08 + 0) / 2 for the pair, and A = 0.04 again, with Dunnett's 3.4.
    differences = arms_against_first([wild, *[calm] * 5])
    assert all(difference.high - difference.value > 0.6 for difference in differences)


def test_one_seed_tells_nothing_of_training_however_narrow_its_interval_is() -> None:
    before, after = np.full(300, 0.2), np.full(300, 0.8)
    intervals = [
        gain_interval(before, after),
        mean_interval(after),
        *arms_against_first([before, after, after]),
    ]
    assert {interval.holds_for for interval in intervals} == {THESE_WEIGHTS}
    assert all(interval.excludes(0) and not interval.tells_from(0) for interval in intervals)
    (difference,) = arms_against_first([[before] * 2, [after] * 2])
    assert difference.holds_for == NEW_SEEDS
    assert difference.tells_from(0)
    assert not difference.tells_from(0.6)


def test_what_few_or_no_problems_show_is_not_certain() -> None:
    nothing = np.zeros(30)
    assert gain_interval(nothing, nothing).high == pytest.approx(stats.t.ppf(0.975, 29) / 4 / 31)
    (difference,) = arms_against_first([nothing, nothing])
    assert difference.low < 0 < difference.high


@pytest.mark.parametrize("solved", [0, 1, 2, 298, 299, 300])
def test_the_interval_of_a_share_stays_within_0_and_1_and_says_more_than_the_table_did(solved: int) -> None:
    scores = np.zeros(300)
    scores[:solved] = 1
    interval = mean_interval(scores)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    assert 0.005 < interval.high - interval.low < 0.05


def test_one_problem_says_nothing_of_others() -> None:
    assert mean_interval([0.5]) == Interval(0.5, 0.0, 1.0, THESE_WEIGHTS)


def test_the_level_of_the_interval_is_obeyed() -> None:
    values = np.linspace(0, 1, 50) ** 2
    wide, narrow = mean_interval(values, confidence=0.95), mean_interval(values, confidence=0.5)
    assert 0 < wide.low < narrow.low < narrow.value < narrow.high < wide.high < 1


def test_the_difference_of_two_arms_pairs_problems_and_not_seeds() -> None:
    problems = np.random.default_rng(0).random(100)
    (shift,) = arms_against_first([np.tile(problems - 1, (2, 1)), np.tile(problems - 0.9, (3, 1))])
    assert (shift.low, shift.value, shift.high) == pytest.approx((0.1, 0.1, 0.1))


@pytest.mark.parametrize(("count", "freedom"), [(2, 5.0), (5, 20.0), (9, math.inf)])
def test_several_arms_get_dunnetts_factor(count: int, freedom: float) -> None:
    factor = factors.dunnett(count, freedom, 0.95)
    shape, ends = np.full((count, count), 0.5) + 0.5 * np.eye(count), np.full(count, factor)
    if math.isinf(freedom):
        inside = stats.multivariate_normal(cov=shape).cdf(ends, lower_limit=-ends, rng=np.random.default_rng(0))
    else:
        inside = stats.multivariate_t(shape=shape, df=freedom).cdf(ends, lower_limit=-ends, random_state=0)
    assert inside == pytest.approx(0.95, abs=5e-4)


def arm(rng: np.random.Generator, difficulty: np.ndarray, seeds: int, luck: float = 2.0) -> np.ndarray:
    """Scores [seeds, problems]: `luck` points a seed (a point is 0.064 logits here), eight answers a problem."""
    shift = 0.064 * luck * rng.standard_normal((seeds, 1))
    effect = 0.5 * rng.standard_normal(difficulty.shape)
    return rng.binomial(8, 1 / (1 + np.exp(-(difficulty + effect + shift)))) / 8


@pytest.mark.parametrize(("seeds", "problems", "luck"), [(2, 30, 1.0), (2, 300, 3.0), (3, 100, 2.0), (5, 30, 2.0)])
def test_equal_arms_are_seldom_said_to_differ_and_means_and_gains_are_held(
    seeds: int, problems: int, luck: float
) -> None:
    rng = np.random.default_rng([seeds, problems])
    trials, claims, held = 300, 0, np.zeros(4)
    for _ in range(trials):
        difficulty = 2 * rng.standard_normal(problems)
        before = rng.binomial(8, 1 / (1 + np.exp(-difficulty))) / 8
        arms = [arm(rng, difficulty, seeds, luck) for _ in range(6)]
        spread, of_gains = spread_of(arms), spread_of([each - before for each in arms])
        claims += any(interval.tells_from(0) for interval in arms_against_first(arms))
        held += [
            not mean_interval(arms[0]).excludes(0.5),
            not gain_interval(before, arms[0]).excludes(0),
            not mean_interval(arms[0], spread=spread).excludes(0.5),
            not gain_interval(before, arms[0], spread=of_gains).excludes(0),
        ]
    assert claims / trials <= 0.08  # 0.05 expected, standard deviation 0.013
    assert (held / trials).min() >= 0.91  # 0.95 expected, standard deviation 0.013
    assert (held / trials).max() < 1


def test_the_best_of_many_equal_trials_are_seldom_confirmed_on_fresh_seeds() -> None:
    rng = np.random.default_rng(0)
    trials, claims, flattered = 200, 0, 0.0
    for _ in range(trials):
        difficulty = 2 * rng.standard_normal(100)
        effects = 0.5 * rng.standard_normal((8, 100))
        seeds_of = [[arm_with(rng, difficulty + effect) for _ in range(6)] for effect in effects]
        values = [runs[0].mean() for runs in seeds_of]
        best = [int(number) for number in np.argsort(values)[::-1] if number][:3]
        flattered += (values[best[0]] - 0.5) / trials
        confirmed = arms_against_first([seeds_of[number][1:] for number in (0, *best)])
        claims += any(interval.tells_from(0) for interval in confirmed)
    assert flattered > 0.02  # by the selection
    assert claims / trials <= 0.08


def arm_with(rng: np.random.Generator, logits: np.ndarray) -> np.ndarray:
    """Scores [problems] of one seed with two points of luck."""
    return rng.binomial(8, 1 / (1 + np.exp(-(logits + 0.128 * rng.standard_normal())))) / 8


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
        mean_interval(scores)  # type: ignore[arg-type]


def test_problems_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="do not pair"):
        gain_interval([0.0, 1.0], [0.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="same problems"):
        arms_against_first([[0.0, 1.0], [0.0, 1.0, 1.0]])
    with pytest.raises(ValueError, match="needs two"):
        arms_against_first([[0.0, 1.0]])


def test_a_level_near_one_and_one_degree_of_freedom_have_an_interval() -> None:
    assert mean_interval([0.0, 1.0], confidence=0.999).high <= 1
    arms = [[[0.1, 0.9, 0.4]]] * 15 + [[[0.2, 0.8, 0.4], [0.4, 0.9, 0.6]]]
    widest = arms_against_first(arms, confidence=0.999)[-1]
    assert widest.known
    assert widest.low < widest.high


def test_one_problem_gives_a_gain_without_an_interval() -> None:
    interval = gain_interval([0.0], [0.5])
    assert interval.value == 0.5
    assert not interval.known
    assert not interval.excludes(0)
