"""How far a judge agrees with labels: agreement, kappa, and what its deviations follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rpg.statistics.factors import student
from rpg.statistics.intervals import mean_interval
from rpg.statistics.variance import Interval

Values = NDArray[np.float64]
Figure = Callable[[NDArray[np.intp]], float]
"""A figure of the judgements at these places; NaN where they have none."""


@dataclass(frozen=True, slots=True)
class Judgements:
    """What a judge and the labels say of the same answers, or of the same pairs of answers."""

    judged: Values
    """The judge's number: on the scale, or for a pair 1 where the first is the better one, 0.5, or 0."""
    labels: Values
    """The labels' numbers, in the same unit."""
    length: Values
    """Base 2 logarithm of the answer's length, or of the first one's over the second one's."""
    own: NDArray[np.bool_]
    """Whether the judge itself wrote the answer, or the first of the pair and not the second."""
    clusters: Sequence[str]
    """The problem of each: judgements of one problem are not independent."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Figures with intervals over problems."""

    count: int
    problems: int
    agreement: Interval
    """Share of answers whose number, rounded to those of the labels, is the label's."""
    kappa: Interval
    """Cohen's: agreement beyond that of two who say each number as often, and independently. 0: none, 1: all."""
    weighted_kappa: Interval
    """With squared differences as weights: how near the numbers are, beyond chance."""
    leniency: Interval
    """Mean of the judge's number less the label's."""
    length: Interval
    """By how much that difference rises where an answer is twice as long."""
    own: Interval
    """Mean of that difference for answers that the judge wrote, less that for others; NaN where there are not both."""


def agreement_of(data: Judgements, *, confidence: float = 0.95) -> Agreement:
    """The figures; intervals are jackknives over problems, with Student's factor, that of a share as `mean_interval`.

    Raises:
        ValueError: fewer than two problems.
    """
    problems, of_problem = np.unique(np.array(data.clusters), return_inverse=True)
    if len(problems) < 2:
        raise ValueError("intervals need labels of two problems at least")
    rounded = nearest(data.judged, data.labels)
    difference = data.judged - data.labels
    same = (rounded == data.labels).astype(np.float64)
    agreement = mean_interval(same, confidence=confidence, clusters=list(data.clusters), shares=True)

    def interval(figure: Figure, least: float = -np.inf, most: float = np.inf) -> Interval:
        value = figure(np.arange(len(difference)))
        without = np.array([figure(np.flatnonzero(of_problem != problem)) for problem in range(len(problems))])
        known = without[~np.isnan(without)]
        if np.isnan(value) or len(known) < 2:
            return Interval(value, np.nan, np.nan)
        variance = (len(known) - 1) / len(known) * float(((known - known.mean()) ** 2).sum())
        half = student(len(known) - 1, confidence) * variance**0.5
        return Interval(value, max(least, value - half), min(most, value + half))

    def own(places: NDArray[np.intp]) -> float:
        mine = data.own[places]
        if mine.all() or not mine.any():
            return float("nan")
        return float(difference[places][mine].mean() - difference[places][~mine].mean())

    kappa = interval(lambda places: cohens_kappa(rounded[places], data.labels[places]), -1, 1)
    return Agreement(
        count=len(difference),
        problems=len(problems),
        agreement=agreement,
        kappa=_not_surer(kappa, agreement, chance(rounded, data.labels)),
        weighted_kappa=interval(lambda places: weighted_kappa(data.judged[places], data.labels[places]), -1, 1),
        leniency=interval(lambda places: float(difference[places].mean())),
        length=interval(lambda places: slope(data.length[places], difference[places])),
        own=interval(own),
    )


def nearest(judged: Values, labels: Values) -> Values:
    """Each number rounded to the nearest of the labels' kinds: to a whole one where all labels are whole."""
    if (labels == np.rint(labels)).all():
        return np.rint(judged)
    kinds: Values = np.unique(labels)
    rounded: Values = kinds[np.abs(judged[:, None] - kinds[None, :]).argmin(axis=1)]
    return rounded


def cohens_kappa(first: Values, second: Values) -> float:
    """Cohen's kappa of two who gave each thing a number; NaN where both only ever say one.

    Source: Cohen 1960, Educational and Psychological Measurement 20.
    Example: they agree on 3 of 4; by chance on 1/2 * 3/4 + 1/2 * 1/4 = 1/2.
        >>> cohens_kappa(np.array([1.0, 1, 0, 0]), np.array([1.0, 1, 1, 0]))
        0.5
    """
    agreed, by_chance = float((first == second).mean()), chance(first, second)
    return (agreed - by_chance) / (1 - by_chance) if by_chance < 1 else float("nan")


def weighted_kappa(first: Values, second: Values) -> float:
    """Kappa with squared differences as weights: 1 less the mean square over that of all pairs of the two.

    Source: Cohen 1968, Psychological Bulletin 70.
    Example: squares 0, 0, 1 have the mean 1/3; of all nine pairs of (1, 2, 3) and (1, 2, 2) they have 9/9.
        >>> round(weighted_kappa(np.array([1.0, 2, 3]), np.array([1.0, 2, 2])), 4)
        0.6667
    """
    by_chance = float(((first[:, None] - second[None, :]) ** 2).mean())
    return 1 - float(((first - second) ** 2).mean()) / by_chance if by_chance else float("nan")


def slope(of: Values, values: Values) -> float:
    """Least squares; NaN where `of` does not vary."""
    centred = of - of.mean()
    spread = float((centred**2).sum())
    return float((centred * values).sum()) / spread if spread > 1e-12 else float("nan")


def chance(first: Values, second: Values) -> float:
    """Share on which two agree who say each number as often, and independently."""
    kinds = np.union1d(first, second)
    return float(sum((first == kind).mean() * (second == kind).mean() for kind in kinds))


def _not_surer(kappa: Interval, agreement: Interval, by_chance: float) -> Interval:
    """The interval of kappa; where nothing differs, so that a jackknife has no width, with the lower end of the
    agreement's."""
    if np.isnan(kappa.value) or kappa.high > kappa.low:
        return kappa
    return Interval(kappa.value, (agreement.low - by_chance) / (1 - by_chance), kappa.high)
