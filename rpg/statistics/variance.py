"""Tables of scores, and the components of the variance of a mean or of a difference of means."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

Table = NDArray[np.float64]
"""[seeds, problems]"""
NEW_SEEDS = "new seeds, new problems"
THESE_WEIGHTS = "these weights, new problems"


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its interval."""

    value: float
    low: float
    """Lower end of the interval; NaN if the observations give none."""
    high: float
    """Upper end of the interval; NaN if the observations give none."""
    holds_for: str = NEW_SEEDS
    """NEW_SEEDS, or THESE_WEIGHTS if the interval comes from one seed."""

    @property
    def known(self) -> bool:
        """Returns whether the interval exists."""
        return not math.isnan(self.low)

    def within(self, least: float, most: float) -> "Interval":
        """Returns the interval, cut to possible values of the figure: a probability is at most 1, a duration at least
        0."""
        return replace(self, low=max(self.low, least), high=min(self.high, most)) if self.known else self

    def excludes(self, value: float) -> bool:
        """Returns whether the interval lies wholly to one side of `value`."""
        return self.low > value or self.high < value

    def tells_from(self, value: float) -> bool:
        """Returns whether training is shown to lead to a figure other than `value`. One seed never shows this."""
        return self.holds_for == NEW_SEEDS and self.excludes(value)


@dataclass(frozen=True, slots=True)
class Spread:
    """Variance of seeds' means within an arm, pooled over arms that are trained in the same way."""

    variance: float
    """Variance of one seed's mean; 0 if no arm has two seeds."""
    freedom: int
    """Degrees of freedom of that variance: seeds minus arms."""

    @property
    def holds_for(self) -> str:
        """Returns the scope of an interval with this spread: new seeds, or these weights."""
        return NEW_SEEDS if self.freedom else THESE_WEIGHTS


@dataclass(frozen=True, slots=True)
class Variance:
    """Components of the variance of a mean, or of a difference of means; see the docstring of this package."""

    by_seed: float
    """A: the variance of the seeds' means over S."""
    seed_freedom: float
    by_problem: float
    """B: the variance of the problems' means over P."""
    problem_freedom: float
    noise: float
    """E: the residual mean square over S P."""
    unseen: float
    """Addition to V for problems that are solved, or that change, so rarely that the table has few or none of them."""

    def half_width(self, factor: Callable[[float], float]) -> float:
        """Returns half the width of the interval; NaN if there is only one problem, which says nothing about others.

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
    """Returns the seeds' spread within each table [seeds, problems], pooled."""
    means = [as_table(table, "scores").mean(axis=1) for table in tables]
    freedom = sum(len(row) - 1 for row in means)
    squares = sum(float(((row - row.mean()) ** 2).sum()) for row in means)
    return Spread(squares / freedom if freedom else 0.0, freedom)


def spread_with_failures(table: Table, failed: int, reach: float) -> Spread:
    """Returns the seeds' spread of an arm with failed seeds. It is at least the spread of seeds that fail at random.

    If all seeds of an arm failed, or none, the next one may still differ. The probability of a failure is estimated as
    (failed + 1) / (seeds + 2) (Laplace's rule of succession).

    Args:
        table: [seeds, problems], failed seeds at the worst value.
        reach: distance from the worst value to the mean of a seed that does not fail.
    """
    chance = (failed + 1) / (len(table) + 2)
    variance = chance * (1 - chance) * reach**2
    return Spread(max(spread_of([table]).variance, variance), max(len(table) - 1, 1))


def residual_variance(tables: Sequence[Table]) -> float:
    """Returns the pooled variance of an entry after the means of its seed and its problem are subtracted. 0 if no arm
    has two seeds."""
    squares = freedom = 0.0
    for table in tables:
        rest = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
        squares += float((rest**2).sum())
        freedom += (table.shape[0] - 1) * (table.shape[1] - 1)
    return squares / freedom if freedom else 0.0


def arm_by_problem(tables: Sequence[Table]) -> tuple[float, float]:
    """Returns the variance of a problem's mean in one arm after arms' and problems' means are subtracted, and its
    degrees of freedom."""
    means = np.stack([table.mean(axis=0) for table in tables])
    rest = means - means.mean(axis=0) - means.mean(axis=1, keepdims=True) + means.mean()
    freedom = (means.shape[0] - 1) * (means.shape[1] - 1)
    return (float((rest**2).sum()) / freedom if freedom else math.nan), freedom


def are_shares(*tables: Table) -> bool:
    return all(table.min() >= 0 and table.max() <= 1 for table in tables)


def unseen_successes(share: float, problems: int) -> float:
    """Returns the variance of a mean share that a table with few successes, or with few failures, does not show.

    The next problem may be a success of a kind that did not occur yet. So one problem's variance, share (1 - share), is
    added over P + 1 and over (1 + few)^(3/2), where few is the number of problems of the rarer kind.
    """
    few = (problems + 1) * min(share, 1 - share) - 0.5
    return share * (1 - share) / (problems + 1) / math.pow(1 + few, 1.5)


def unseen_moves(moves: NDArray[np.float64]) -> float:
    """Returns the variance of a mean difference that a table with few differing problems does not show.

    One more problem may have moved, by 1/4 say. So the square of 1/4 is added over (P + 1)^2 and over (1 + n)^2, where
    n is the effective number of problems that moved: (sum m^2)^2 / sum m^4.

    Args:
        moves: [problems], differences of shares.
    """
    fourth = float((moves**4).sum())
    moved = float((moves**2).sum()) ** 2 / fourth if fourth else 0.0
    return (1 / 4 / (len(moves) + 1) / (moved + 1)) ** 2


def as_table(scores: ArrayLike, name: str) -> Table:
    table = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"{name} must be [seeds, problems] with at least one of each, not {table.shape}")
    if not np.isfinite(table).all():
        raise ValueError(f"{name} holds a value that is not finite")
    return table


def by_cluster(table: Table, clusters: Sequence[object]) -> Table:
    """Returns a table [seeds, clusters] whose variation over clusters is that of the mean when whole clusters are
    drawn.

    Entry (s, c) is m + G / P times the sum over the cluster's problems of (score - m), with m the table's mean, G
    clusters and P problems. A seed's mean does not change. The variance over the entries is that of a ratio of two
    totals, so that clusters may be of unequal size. With one problem a cluster the table does not change.

    Args:
        clusters: a label for each problem.
    Source: Cochran 1977, Sampling Techniques, ch. 6 (the ratio estimator) and ch. 9A (clusters of unequal size).
    """
    if len(clusters) != table.shape[1]:
        raise ValueError(f"{len(clusters)} cluster labels for {table.shape[1]} problems")
    names = {name: place for place, name in enumerate(dict.fromkeys(clusters))}
    members = np.zeros((table.shape[1], len(names)))
    members[np.arange(table.shape[1]), [names[name] for name in clusters]] = 1
    mean = table.mean()
    return np.asarray(mean + len(names) / table.shape[1] * ((table - mean) @ members))
