"""Intervals for a mean, a gain, several arms against the first, and figures with one value per seed."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rpg.statistics.factors import dunnett, student
from rpg.statistics.variance import (
    THESE_WEIGHTS,
    Interval,
    Spread,
    Table,
    Variance,
    are_shares,
    arm_by_problem,
    as_table,
    by_cluster,
    residual_variance,
    spread_of,
    unseen_moves,
    unseen_successes,
)

_LEAST_SKEWED = 3
"""Smallest number of problems from which skewness can be estimated."""
_NOT_SKEWED = 1e-6
"""Skewness of a mean below which no correction is made, because the correction divides by it."""


def mean_interval(
    scores: ArrayLike,
    *,
    confidence: float = 0.95,
    spread: Spread | None = None,
    clusters: Sequence[object] | None = None,
    shares: bool | None = None,
) -> Interval:
    """Returns the interval of the mean over seeds and problems, for new seeds and new problems. From one seed, it holds
    only for new problems.

    Shares (all scores in [0, 1]) get the interval on the logit scale, around (P mean + 1/2) / (P + 1), which is never 0
    or 1. It holds near 0 and 1 too and never leaves [0, 1]. Other scores get Student's interval, corrected for the
    skewness of the problems: the mean of a few large scores and many small ones is more often too low than too high.

    Args:
        scores: [seeds, problems] or [problems].
        confidence: level of the interval, in (0, 1).
        spread: spread of the seeds, pooled with other arms. None: from this table alone. A table whose seeds differ
            more than that counts with its own variance.
        clusters: a label for each problem; problems of one cluster are not independent.
        shares: whether the scores are shares. None: true if all are in [0, 1].
    Raises:
        ValueError: no scores, or one that is not finite.
    Example: four problems, half of them right. The problems' variance is 1/3, so V = 1/12, and (1/4) / 5 / 3^1.5 is
    added for rare successes; t(0.975, 3) = 3.18; a logit is 4 times as wide as a share there.
        >>> interval = mean_interval([0, 0, 1, 1])
        >>> interval.value, round(interval.low, 2), round(interval.high, 2)
        (0.5, 0.02, 0.98)
    """
    table = as_table(scores, "scores")
    spread = spread or spread_of([table])
    shares = are_shares(table) if shares is None else shares
    table = table if clusters is None else by_cluster(table, clusters)
    mean, problems = float(table.mean()), table.shape[1]
    centre = (problems * mean + 0.5) / (problems + 1)
    unseen = unseen_successes(centre, problems) if shares else 0.0
    half = _variance_of_mean(table, spread, unseen).half_width(lambda freedom: student(freedom, confidence))
    if not shares:
        return Interval(mean, *_skewed_ends(table, half, confidence), spread.holds_for)
    if math.isnan(half):
        return Interval(mean, 0.0, 1.0, spread.holds_for)
    logit, half_of_logit = math.log(centre / (1 - centre)), half / (centre * (1 - centre))
    low, high = ((1 + math.tanh(end / 2)) / 2 for end in (logit - half_of_logit, logit + half_of_logit))
    return Interval(mean, min(low, mean), max(high, mean), spread.holds_for)


def gain_interval(
    before: ArrayLike,
    after: ArrayLike,
    *,
    confidence: float = 0.95,
    spread: Spread | None = None,
    clusters: Sequence[object] | None = None,
    shares: bool | None = None,
) -> Interval:
    """Returns the interval of the change of the mean from `before` to `after`, paired by problem and seed.

    Args:
        before: [seeds, problems] or [problems]; one row serves every seed of `after` (a shared base model).
        after: [seeds, problems], the same problems in the same order.
        confidence: level of the interval, in (0, 1).
        spread: spread of the seeds' gains, pooled with other arms. None: from these tables alone. See `mean_interval`.
        clusters: as for `mean_interval`.
        shares: as for `mean_interval`.
    Raises:
        ValueError: shapes that do not fit together, no scores, or one that is not finite.
    """
    first, second = as_table(before, "before"), as_table(after, "after")
    if first.shape[1] != second.shape[1] or first.shape[0] not in (1, second.shape[0]):
        raise ValueError(
            f"before {first.shape} and after {second.shape} do not pair: [seeds, problems] of the same problems"
        )
    gains = second - first
    gains = gains if clusters is None else by_cluster(gains, clusters)
    spread = spread or spread_of([gains])
    shares = are_shares(first, second) if shares is None else shares
    unseen = unseen_moves(gains.mean(axis=0)) if shares else 0.0
    half = _variance_of_mean(gains, spread, unseen).half_width(lambda freedom: student(freedom, confidence))
    mean = float(gains.mean())
    interval = Interval(mean, mean - half, mean + half, spread.holds_for)
    return interval.within(-1, 1) if shares else interval


def arms_against_first(arms: Sequence[ArrayLike], *, confidence: float = 0.95) -> list[Interval]:
    """Returns intervals of the mean of each later arm minus the mean of the first. The intervals hold simultaneously.

    They control one error: in `confidence` of all experiments every interval contains the true difference of its arm
    from the first (Dunnett's factor). They control no others. The function compares no two arms after the first, names
    no best, and makes no allowance for earlier analyses with fewer seeds or for failed seeds; `verdict` controls these.
    It assumes that the seeds of all arms vary alike: with unequal numbers of seeds and an arm of few seeds that varies
    more, its intervals miss more often. With one seed an arm, they hold only for these weights on new problems.

    Problems are paired and seeds are not: seed 0 of one setting and seed 0 of another are not a pair. The spread of the
    seeds and of arms over problems is pooled over all arms. Two arms whose own seeds differ more than the pooled spread
    count with their own spread.

    Args:
        arms: tables [seeds, problems] of the same problems in the same order; numbers of seeds may differ.
        confidence: level of all intervals together, in (0, 1).
    Raises:
        ValueError: fewer than two arms, different problems, no scores, or one that is not finite.
    """
    tables = [as_table(arm, "scores") for arm in arms]
    if len(tables) < 2:
        raise ValueError(f"{len(tables)} arm: a difference needs two")
    if len({table.shape[1] for table in tables}) > 1:
        shapes = ", ".join(str(table.shape) for table in tables)
        raise ValueError(f"the arms {shapes} are not about the same problems")
    first, *others = tables
    spread, residual = spread_of(tables), residual_variance(tables)
    problem_variance, problem_freedom = arm_by_problem(tables)
    problems, shares = first.shape[1], are_shares(*tables)
    intervals = []
    for other in others:
        inverse_seeds = 1 / len(first) + 1 / len(other)
        moves = other.mean(axis=0) - first.mean(axis=0)
        variance = Variance(
            by_seed=max(spread.variance, spread_of([first, other]).variance) * inverse_seeds,
            seed_freedom=spread.freedom,
            by_problem=2 * problem_variance / problems,
            problem_freedom=problem_freedom,
            noise=residual * inverse_seeds / problems,
            unseen=unseen_moves(moves) if shares else 0.0,
        )
        half = variance.half_width(lambda freedom: dunnett(len(others), freedom, confidence))
        value = float(moves.mean())
        interval = Interval(value, value - half, value + half, spread.holds_for)
        intervals.append(interval.within(-1, 1) if shares else interval)
    return intervals


def seed_mean(values: ArrayLike, *, confidence: float = 0.95, spread: Spread | None = None) -> Interval:
    """Returns the mean of one figure per seed, with Student's t interval. One seed has no interval.

    Args:
        values: one figure per seed.
        confidence: level of the interval, in (0, 1).
        spread: lower bound of the seeds' spread, used for an arm that lost seeds. None: the spread of these figures
            alone.
    Example: 1, 2, 3 have mean 2 and standard error 1/sqrt(3); t(0.975, 2) = 4.303.
        >>> interval = seed_mean([1.0, 2.0, 3.0])
        >>> round(interval.low, 3), round(interval.high, 3)
        (-0.484, 4.484)
    """
    figures = _figures(values)
    mean, count = float(figures.mean()), figures.size
    if count == 1:
        return Interval(mean, math.nan, math.nan, THESE_WEIGHTS)
    variance = max(float(figures.var(ddof=1)), spread.variance if spread else 0.0)
    half = student(count - 1, confidence) * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half)


def seed_difference(first: ArrayLike, second: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Returns the mean of `second` minus the mean of `first`, one figure per seed, with Welch's interval (none from one
    seed)."""
    left, right = _figures(first), _figures(second)
    difference = float(right.mean() - left.mean())
    if min(left.size, right.size) == 1:
        return Interval(difference, math.nan, math.nan, THESE_WEIGHTS)
    parts = [(float(group.var(ddof=1)) / group.size, group.size - 1) for group in (left, right)]
    variance = sum(part for part, _ in parts)
    if not variance:
        return Interval(difference, difference, difference)
    freedom = variance**2 / sum(part**2 / alone for part, alone in parts)
    half = student(freedom, confidence) * math.sqrt(variance)
    return Interval(difference, difference - half, difference + half)


def _skewed_ends(table: Table, half: float, confidence: float) -> tuple[float, float]:
    """Returns the ends of a mean's interval, given its half-width. Both ends are corrected for the problems' skewness.

    Student's t of a skewed sample is transformed by g(t) = t + a t^2 / 3 + a^2 t^3 / 27 + a / 6, which is nearly free
    of skewness, with a the skewness of the mean over problems: that of a problem over sqrt(P), reduced if seeds
    contribute to the variance.
    Source: Hall 1992, On the removal of skewness by transformation, J. R. Statist. Soc. B 54.
    """
    means = table.mean(axis=0)
    mean, problems, deviation = float(means.mean()), len(means), float(means.std(ddof=1)) if len(means) > 1 else 0.0
    if problems < _LEAST_SKEWED or not deviation or not half:
        return mean - half, mean + half
    factor = student(problems - 1, confidence)
    error = half / factor
    skewness = problems / ((problems - 1) * (problems - 2)) * float((((means - mean) / deviation) ** 3).sum())
    a = skewness / math.sqrt(problems) * min(1.0, deviation / math.sqrt(problems) / error) ** 3
    if abs(a) < _NOT_SKEWED:
        return mean - half, mean + half
    low, high = (3 / a * (math.cbrt(1 + a * (end - a / 6)) - 1) for end in (factor, -factor))
    return mean - error * low, mean - error * high


def _variance_of_mean(table: Table, spread: Spread, unseen: float) -> Variance:
    """Returns the variance of a table's mean. From one seed, it is that of the same weights on new problems."""
    seeds, problems = table.shape
    return Variance(
        by_seed=max(spread.variance, spread_of([table]).variance) / seeds,
        seed_freedom=spread.freedom,
        by_problem=float(table.mean(axis=0).var(ddof=1)) / problems if problems > 1 else math.nan,
        problem_freedom=problems - 1,
        noise=residual_variance([table]) / (seeds * problems),
        unseen=unseen,
    )


def _figures(values: ArrayLike) -> NDArray[np.float64]:
    figures = np.asarray(values, dtype=np.float64).ravel()
    if figures.size == 0 or not np.isfinite(figures).all():
        raise ValueError("needs at least one figure, all of them finite")
    return figures
