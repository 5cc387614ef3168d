"""Intervals for scores of seeds and problems: means, gains, and many arms held against the first.

Scores are a table [seeds, problems], each entry the mean over one problem's samples; one seed may come as [problems].
The held-out problems are a sample of all problems and the seeds a sample of all seeds, so a mean varies with both. The
two-way table with one entry a cell estimates three parts of that variance:

    A   s^2 / S, s^2 the variance of the seeds' means
    B   the variance of the problems' means over P
    E   the residual mean square over S P, which A and B both contain

The mean's variance is V = max(A + B - E, A, B). B rests on many problems and A on few seeds, sometimes two. One factor
of Student's t for both is wrong: with the problems' an interval is too narrow, with the seeds' far too wide. The
half-width h has the problems' factor t_B for the whole of V. The larger factor t_A of the seeds is for a share of A:
all of it where A is most of V, little of it where A is residual noise or small beside B:

    h^2 = t_B^2 V + (t_A^2 - t_B^2) A^2 / (A + E + B / 4)

With one seed A is unknown. An interval then holds for these weights on new problems and says nothing of what another
seed would have learnt: `Interval.holds_for` says which of the two it is, and `Interval.tells_from` is false.

Source: two-way random effects, Searle 1992, Variance Components, ch. 4; limits for sums of mean squares, each with a
factor of its own, Burdick and Graybill 1992, Confidence Intervals on Variance Components, ch. 3; many arms, Dunnett
1955. The share A / (A + E + B / 4) and the terms for rare successes were chosen by simulation: benchmarks/coverage.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Table = NDArray[np.float64]
"""[seeds, problems]"""
NEW_SEEDS = "new seeds, new problems"
THESE_WEIGHTS = "these weights, new problems"


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and how sure it is."""

    value: float
    low: float
    """Lower end of the interval; NaN where the observations give none."""
    high: float
    """Upper end of the interval; NaN where the observations give none."""
    holds_for: str = NEW_SEEDS
    """NEW_SEEDS, or THESE_WEIGHTS where it comes from one seed."""

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)

    def within(self, least: float, most: float) -> "Interval":
        """The part of the interval that the figure can be in: a probability is not above 1, a duration not below 0."""
        return replace(self, low=max(self.low, least), high=min(self.high, most)) if self.known else self

    def excludes(self, value: float) -> bool:
        """Whether the interval lies wholly to one side of `value`."""
        return self.low > value or self.high < value

    def tells_from(self, value: float) -> bool:
        """Whether training is shown to lead elsewhere than `value`. One seed never shows it."""
        return self.holds_for == NEW_SEEDS and self.excludes(value)


@dataclass(frozen=True, slots=True)
class Spread:
    """The variance of seeds' means within an arm, pooled over arms that are trained alike."""

    variance: float
    """Of one seed's mean; 0 where no arm has two seeds."""
    freedom: int
    """Degrees of freedom behind it: seeds less arms."""

    @property
    def holds_for(self) -> str:
        """What an interval with this spread is about."""
        return NEW_SEEDS if self.freedom else THESE_WEIGHTS


@dataclass(frozen=True, slots=True)
class _Variance:
    """The variance of a mean or of a difference of means, in parts; see the top of this file."""

    by_seed: float
    """A"""
    seed_freedom: float
    by_problem: float
    """B"""
    problem_freedom: float
    noise: float
    """E"""
    unseen: float
    """Added to V: what problems would add that are solved, or are moved, so seldom that the table has none or few."""

    def half_width(self, factor: Callable[[float], float]) -> float:
        """Half the width of the interval; NaN where one problem says nothing of others.

        Args:
            factor: degrees of freedom -> half-width in standard errors.
        """
        if math.isnan(self.by_problem):
            return math.nan
        variance = max(self.by_seed + self.by_problem - self.noise, self.by_seed, self.by_problem) + self.unseen
        squared = factor(self.problem_freedom) ** 2 * variance
        if self.by_seed:
            extra = factor(self.seed_freedom) ** 2 - factor(self.problem_freedom) ** 2
            squared += max(extra, 0.0) * self.by_seed**2 / (self.by_seed + self.noise + self.by_problem / 4)
        return math.sqrt(squared)


def spread_of(tables: Sequence[ArrayLike]) -> Spread:
    """The seeds' spread within each table [seeds, problems], pooled."""
    means = [_table(table, "scores").mean(axis=1) for table in tables]
    freedom = sum(len(row) - 1 for row in means)
    squares = sum(float(((row - row.mean()) ** 2).sum()) for row in means)
    return Spread(squares / freedom if freedom else 0.0, freedom)


def mean_interval(scores: ArrayLike, *, confidence: float = 0.95, spread: Spread | None = None) -> Interval:
    """The mean over seeds and problems, for new seeds and new problems; from one seed for new problems alone.

    Shares (all scores in [0, 1]) get the interval on the logit scale, around (P mean + 1/2) / (P + 1), which is never 0
    or 1. It holds near 0 and 1 too and never leaves [0, 1].

    Args:
        scores: [seeds, problems] or [problems].
        confidence: level of the interval, in (0, 1).
        spread: of the seeds, pooled with other arms; left out: from this table alone. A table whose seeds differ more
            than that counts with its own variance.
    Raises:
        ValueError: no scores, or one that is not finite.
    Example: four problems, half of them right. The problems' variance is 1/3, so V = 1/12, and (1/4) / 5 / 3^1.5 is
    added for rare successes; t(0.975, 3) = 3.18; a logit is 4 times as wide as a share there.
        >>> interval = mean_interval([0, 0, 1, 1])
        >>> interval.value, round(interval.low, 2), round(interval.high, 2)
        (0.5, 0.02, 0.98)
    """
    table = _table(scores, "scores")
    spread = spread or spread_of([table])
    mean, problems, shares = float(table.mean()), table.shape[1], _are_shares(table)
    centre = (problems * mean + 0.5) / (problems + 1)
    unseen = _unseen_successes(centre, problems) if shares else 0.0
    half = _variance_of_mean(table, spread, unseen).half_width(lambda freedom: _student(freedom, confidence))
    if not shares:
        return Interval(mean, mean - half, mean + half, spread.holds_for)
    if math.isnan(half):
        return Interval(mean, 0.0, 1.0, spread.holds_for)
    logit, half_of_logit = math.log(centre / (1 - centre)), half / (centre * (1 - centre))
    low, high = ((1 + math.tanh(end / 2)) / 2 for end in (logit - half_of_logit, logit + half_of_logit))
    return Interval(mean, min(low, mean), max(high, mean), spread.holds_for)


def gain_interval(
    before: ArrayLike, after: ArrayLike, *, confidence: float = 0.95, spread: Spread | None = None
) -> Interval:
    """How far the mean moved from `before` to `after`, each problem and seed held against itself.

    Args:
        before: [seeds, problems] or [problems]; one row serves every seed of `after` (a shared base model).
        after: [seeds, problems], the same problems in the same order.
        confidence: level of the interval, in (0, 1).
        spread: of the seeds' gains, pooled with other arms; left out: from these tables alone. See `mean_interval`.
    Raises:
        ValueError: shapes that do not fit together, no scores, or one that is not finite.
    """
    first, second = _table(before, "before"), _table(after, "after")
    if first.shape[1] != second.shape[1] or first.shape[0] not in (1, second.shape[0]):
        raise ValueError(
            f"before {first.shape} and after {second.shape} do not pair: [seeds, problems] of the same problems"
        )
    gains = second - first
    spread = spread or spread_of([gains])
    unseen = _unseen_moves(gains.mean(axis=0)) if _are_shares(first, second) else 0.0
    half = _variance_of_mean(gains, spread, unseen).half_width(lambda freedom: _student(freedom, confidence))
    mean = float(gains.mean())
    return Interval(mean, mean - half, mean + half, spread.holds_for)


def arms_against_first(arms: Sequence[ArrayLike], *, confidence: float = 0.95) -> list[Interval]:
    """The mean of each arm after the first less that of the first; the intervals hold together.

    Problems are paired and seeds are not: seed 0 of one setting and seed 0 of another are no pair. The spread of the
    seeds and of arms over problems is pooled over all arms, and with several arms the factor is Dunnett's, so that in
    `confidence` of all experiments none of the intervals misses its truth. Two arms whose own seeds differ more than
    the pooled spread says count with their own.

    Args:
        arms: tables [seeds, problems] of the same problems in the same order; numbers of seeds may differ.
        confidence: level of all intervals together, in (0, 1).
    Raises:
        ValueError: fewer than two arms, other problems, no scores, or one that is not finite.
    """
    tables = [_table(arm, "scores") for arm in arms]
    if len(tables) < 2:
        raise ValueError(f"{len(tables)} arm: a difference needs two")
    if len({table.shape[1] for table in tables}) > 1:
        shapes = ", ".join(str(table.shape) for table in tables)
        raise ValueError(f"the arms {shapes} are not about the same problems")
    first, *others = tables
    spread, residual = spread_of(tables), _residual_variance(tables)
    problem_variance, problem_freedom = _arm_by_problem(tables)
    problems, shares = first.shape[1], _are_shares(*tables)
    intervals = []
    for other in others:
        inverse_seeds = 1 / len(first) + 1 / len(other)
        moves = other.mean(axis=0) - first.mean(axis=0)
        variance = _Variance(
            by_seed=max(spread.variance, spread_of([first, other]).variance) * inverse_seeds,
            seed_freedom=spread.freedom,
            by_problem=2 * problem_variance / problems,
            problem_freedom=problem_freedom,
            noise=residual * inverse_seeds / problems,
            unseen=_unseen_moves(moves) if shares else 0.0,
        )
        half = variance.half_width(lambda freedom: _dunnett(len(others), freedom, confidence))
        value = float(moves.mean())
        intervals.append(Interval(value, value - half, value + half, spread.holds_for))
    return intervals


def seed_mean(values: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Mean of one figure per seed with Student's t interval; one seed has no interval.

    Example: 1, 2, 3 have mean 2 and standard error 1/sqrt(3); t(0.975, 2) = 4.303.
        >>> interval = seed_mean([1.0, 2.0, 3.0])
        >>> round(interval.low, 3), round(interval.high, 3)
        (-0.484, 4.484)
    """
    figures = _figures(values)
    mean, count = float(figures.mean()), figures.size
    if count == 1:
        return Interval(mean, math.nan, math.nan, THESE_WEIGHTS)
    half = _student(count - 1, confidence) * float(figures.std(ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def seed_difference(first: ArrayLike, second: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Mean of `second` minus mean of `first`, one figure per seed, with Welch's interval (none from one seed)."""
    left, right = _figures(first), _figures(second)
    difference = float(right.mean() - left.mean())
    if min(left.size, right.size) == 1:
        return Interval(difference, math.nan, math.nan, THESE_WEIGHTS)
    parts = [(float(group.var(ddof=1)) / group.size, group.size - 1) for group in (left, right)]
    variance = sum(part for part, _ in parts)
    if not variance:
        return Interval(difference, difference, difference)
    freedom = variance**2 / sum(part**2 / alone for part, alone in parts)
    half = _student(freedom, confidence) * math.sqrt(variance)
    return Interval(difference, difference - half, difference + half)


def _variance_of_mean(table: Table, spread: Spread, unseen: float) -> _Variance:
    """The variance of a table's mean; of one seed alone, for these weights on new problems."""
    seeds, problems = table.shape
    return _Variance(
        by_seed=max(spread.variance, spread_of([table]).variance) / seeds,
        seed_freedom=spread.freedom,
        by_problem=float(table.mean(axis=0).var(ddof=1)) / problems if problems > 1 else math.nan,
        problem_freedom=problems - 1,
        noise=_residual_variance([table]) / (seeds * problems),
        unseen=unseen,
    )


def _residual_variance(tables: Sequence[Table]) -> float:
    """Of an entry, once its seed's and its problem's means are taken off; pooled. 0 where no arm has two seeds."""
    squares = freedom = 0.0
    for table in tables:
        rest = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
        squares += float((rest**2).sum())
        freedom += (table.shape[0] - 1) * (table.shape[1] - 1)
    return squares / freedom if freedom else 0.0


def _arm_by_problem(tables: Sequence[Table]) -> tuple[float, float]:
    """Variance of a problem's mean in one arm, once arms' and problems' means are taken off; degrees of freedom."""
    means = np.stack([table.mean(axis=0) for table in tables])
    rest = means - means.mean(axis=0) - means.mean(axis=1, keepdims=True) + means.mean()
    freedom = (means.shape[0] - 1) * (means.shape[1] - 1)
    return (float((rest**2).sum()) / freedom if freedom else math.nan), freedom


def _are_shares(*tables: Table) -> bool:
    return all(table.min() >= 0 and table.max() <= 1 for table in tables)


def _unseen_successes(share: float, problems: int) -> float:
    """Variance of a mean share that a table with few successes, or with few failures, does not show.

    The next problem may be a success of a kind that was not met yet. So one problem's variance, share (1 - share), is
    added over P + 1 and over (1 + few)^(3/2), where few is how many problems' worth of the rarer kind there is.
    """
    few = (problems + 1) * min(share, 1 - share) - 0.5
    return share * (1 - share) / (problems + 1) / math.pow(1 + few, 1.5)


def _unseen_moves(moves: NDArray[np.float64]) -> float:
    """Variance of a mean difference that a table with few differing problems does not show.

    One more problem may have moved, by 1/4 say. So the square of 1/4 is added over (P + 1)^2 and over (1 + n)^2, where
    n is how many problems moved, as an effective number: (sum m^2)^2 / sum m^4.

    Args:
        moves: [problems], differences of shares.
    """
    fourth = float((moves**4).sum())
    moved = float((moves**2).sum()) ** 2 / fourth if fourth else 0.0
    return (1 / 4 / (len(moves) + 1) / (moved + 1)) ** 2


@cache
def _student(freedom: float, confidence: float) -> float:
    """Half-width, in standard errors, of the central interval of Student's t."""
    from scipy import special  # `scipy.stats` has the same values and takes a third of a second to import

    return float(special.stdtrit(freedom, (1 + confidence) / 2))


@cache
def _dunnett(count: int, freedom: float, confidence: float) -> float:
    """Half-width, in standard errors, of `count` intervals against one common arm that hold together.

    Each standardised difference is (z_i - z_0) / (sqrt(2) s), where z_0 belongs to the common arm and s^2 is
    chi-square over its degrees of freedom; given both, the arms are independent. The two integrals are by Gauss's
    quadrature, a thousand times as fast as `scipy.stats.multivariate_t` and as good as its four digits.
    Source: Dunnett 1955, A Multiple Comparison Procedure for Comparing Several Treatments with a Control.
    """
    if count == 1:
        return _student(freedom, confidence)
    from scipy import optimize, special

    common, of_common = np.polynomial.hermite_e.hermegauss(64)
    of_common = of_common / of_common.sum()
    scale, of_scale = np.ones(1), np.ones(1)
    if math.isfinite(freedom):
        places, weights = np.polynomial.legendre.leggauss(128)
        scale, of_scale = np.sqrt(2 * special.gammaincinv(freedom / 2, (places + 1) / 2) / freedom), weights / 2

    def uncovered(factor: float) -> float:
        reach = math.sqrt(2) * factor * scale[:, None]
        inside = (special.ndtr(common + reach) - special.ndtr(common - reach)) ** count
        return float(of_scale @ inside @ of_common) - confidence

    # Bonferroni's factor holds together too, and is never smaller.
    bonferroni = _student(freedom, 1 - (1 - confidence) / count)
    return float(optimize.brentq(uncovered, _student(freedom, confidence), 1.01 * bonferroni, xtol=1e-6))


def _table(scores: ArrayLike, name: str) -> Table:
    table = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"{name} must be [seeds, problems] with at least one of each, not {table.shape}")
    if not np.isfinite(table).all():
        raise ValueError(f"{name} holds a value that is not finite")
    return table


def _figures(values: ArrayLike) -> NDArray[np.float64]:
    figures = np.asarray(values, dtype=np.float64).ravel()
    if figures.size == 0 or not np.isfinite(figures).all():
        raise ValueError("needs at least one figure, all of them finite")
    return figures
