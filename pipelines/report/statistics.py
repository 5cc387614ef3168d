"""Answers with error bars: bootstrap intervals over problems and seeds, Student's intervals over seeds alone.

Scores come as [seeds, problems] (or [problems] for one seed): the mean over the samples of one problem. A held-out set
is a sample of problems, a group of runs a sample of seeds. With several seeds both are resampled, else problems alone.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Scores = NDArray[np.float64]

_CHUNK = 4_000_000
"""Most resampling counts held at once: 32 MB."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and how sure it is."""

    value: float
    low: float
    """Lower end of the interval; NaN where one observation gives none."""
    high: float
    """Upper end of the interval; NaN where one observation gives none."""

    def excludes(self, value: float) -> bool:
        """Whether the interval lies wholly to one side of `value`."""
        return self.low > value or self.high < value


def bootstrap_mean(scores: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """The mean over problems and seeds, with a percentile bootstrap interval.

    Args:
        scores: [seeds, problems] or [problems].
    Raises:
        ValueError: no scores, or one that is not finite.
    Example: four problems, half of them right.
        >>> interval = bootstrap_mean([0, 0, 1, 1])
        >>> interval.value, interval.low, interval.high
        (0.5, 0.0, 1.0)
    """
    table = _table(scores, "scores")
    rng = np.random.default_rng(seed)
    means = _resampled_means([table], resamples, rng)[0]
    return _percentiles(float(table.mean()), means, confidence)


def paired_bootstrap(
    before: ArrayLike, after: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """How far the mean moved from `before` to `after`, each problem held against itself.

    Hierarchical where there are several seeds: every resample draws problems and, apart from them, seeds, both with
    replacement and both the same for the two sides. So the interval answers for new problems and new seeds together;
    with one seed it answers for new problems only.

    Args:
        before: [seeds, problems] or [problems]; one row serves every seed of `after` (a shared base model).
        after: [seeds, problems], the same problems in the same order.
    Raises:
        ValueError: shapes that do not fit together, no scores, or one that is not finite.
    Source: Efron and Tibshirani 1993, ch. 13 (percentile interval); Davison and Hinkley 1997, 3.8 (hierarchical).
    """
    first, second = _table(before, "before"), _table(after, "after")
    if first.shape[1] != second.shape[1] or first.shape[0] not in (1, second.shape[0]):
        raise ValueError(
            f"before {first.shape} and after {second.shape} do not pair: [seeds, problems] of the same problems"
        )
    return bootstrap_mean(second - first, confidence=confidence, resamples=resamples, seed=seed)


def bootstrap_difference(
    first: ArrayLike, second: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Mean of `second` minus mean of `first`, two groups of seeds on the same problems.

    Every resample draws the same problems for both groups, and the seeds of each group on their own: seed 0 of one
    setting and seed 0 of another are no pair.

    Args:
        first: [seeds, problems] or [problems].
        second: [other seeds, problems], the same problems in the same order.
    Raises:
        ValueError: other problems, no scores, or one that is not finite.
    """
    left, right = _table(first, "first"), _table(second, "second")
    if left.shape[1] != right.shape[1]:
        raise ValueError(f"first {left.shape} and second {right.shape} are not about the same problems")
    rng = np.random.default_rng(seed)
    low, high = _resampled_means([left, right], resamples, rng)
    return _percentiles(float(right.mean() - left.mean()), high - low, confidence)


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
        return Interval(mean, float("nan"), float("nan"))
    half = _student(confidence, count - 1) * float(figures.std(ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def seed_difference(first: ArrayLike, second: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Mean of `second` minus mean of `first`, one figure per seed, with Welch's interval (none from one seed)."""
    left, right = _figures(first), _figures(second)
    difference = float(right.mean() - left.mean())
    if min(left.size, right.size) == 1:
        return Interval(difference, float("nan"), float("nan"))
    errors = [float(group.var(ddof=1)) / group.size for group in (left, right)]
    if sum(errors) == 0:
        return Interval(difference, difference, difference)
    freedom = sum(errors) ** 2 / (errors[0] ** 2 / (left.size - 1) + errors[1] ** 2 / (right.size - 1))
    half = _student(confidence, freedom) * math.sqrt(sum(errors))
    return Interval(difference, difference - half, difference + half)


def _student(confidence: float, freedom: float) -> float:
    """Half-width, in standard errors, of the central interval of Student's t."""
    from scipy import stats

    return float(stats.t.ppf((1 + confidence) / 2, freedom))


def _resampled_means(tables: list[Scores], resamples: int, rng: np.random.Generator) -> list[Scores]:
    """The mean of each table in each resample, [resamples] each; the tables share the draw of problems."""
    problems = tables[0].shape[1]
    parts: list[list[Scores]] = [[] for _ in tables]
    for start in range(0, resamples, max(1, _CHUNK // problems)):
        size = min(max(1, _CHUNK // problems), resamples - start)
        drawn = _shares(problems, size, rng)
        for part, table in zip(parts, tables, strict=True):
            by_seed = drawn @ table.T
            part.append((by_seed * _shares(table.shape[0], size, rng)).sum(axis=1))
    return [np.concatenate(part) for part in parts]


def _shares(count: int, size: int, rng: np.random.Generator) -> Scores:
    """[size, count]: which share of a draw of `count` with replacement each of `count` items gets."""
    drawn: Scores = rng.multinomial(count, np.full(count, 1 / count), size=size) / count
    return drawn


def _percentiles(value: float, means: Scores, confidence: float) -> Interval:
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high))


def _table(scores: ArrayLike, name: str) -> Scores:
    table = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"{name} must be [seeds, problems] with at least one of each, not {table.shape}")
    if not np.isfinite(table).all():
        raise ValueError(f"{name} holds a value that is not finite")
    return table


def _figures(values: ArrayLike) -> Scores:
    figures = np.asarray(values, dtype=np.float64).ravel()
    if figures.size == 0 or not np.isfinite(figures).all():
        raise ValueError("needs at least one figure, all of them finite")
    return figures
