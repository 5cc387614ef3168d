"""Agreement of a judge with labels: share, kappa, and how the judge's deviations depend on length and author."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rpg.statistics.factors import student
from rpg.statistics.intervals import mean_interval
from rpg.statistics.variance import Interval

Values = NDArray[np.float64]
Figure = Callable[[NDArray[np.intp]], float]
"""Function from indices of judgements to a figure of these; NaN if it is undefined for them."""


@dataclass(frozen=True, slots=True)
class Judgements:
    """Numbers of a judge and of the labels for the same answers, or for the same pairs of answers."""

    judged: Values
    """The judge's number: on the scale or, for a pair, 1 if the first is the better one, 0.5 for a tie, else 0."""
    labels: Values
    """The labels' numbers, in the same unit."""
    length: Values
    """Base 2 logarithm of the answer's length; for a pair, of the first length over the second."""
    own: NDArray[np.bool_]
    """Whether the judge's model wrote the answer; for a pair, whether it wrote the first and not the second."""
    clusters: Sequence[str]
    """The problem of each judgement. Judgements on the same problem are not independent."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Figures with intervals over problems."""

    count: int
    problems: int
    agreement: Interval
    """Share of answers whose number, rounded to the nearest label value, equals the label."""
    kappa: Interval
    """Cohen's kappa: agreement beyond that of two independent raters who use each number as often. 0: no agreement
    beyond chance; 1: full agreement."""
    weighted_kappa: Interval
    """Kappa with squared differences as weights: how close the numbers are, beyond chance."""
    leniency: Interval
    """Mean of the judge's number minus the label's."""
    length: Interval
    """Increase of that difference when an answer is twice as long."""
    own: Interval
    """Mean of that difference for answers that the judge's model wrote, minus the mean for other answers; NaN if one
    kind is missing."""


def agreement_of(data: Judgements, *, confidence: float = 0.95) -> Agreement:
    """Returns the figures. Intervals are jackknife intervals over problems with Student's factor. That of a share is
    computed as in `mean_interval`.

    Raises:
        ValueError: fewer than two problems.
    """
    problems, of_problem = np.unique(np.array(data.clusters), return_inverse=True)
    if len(problems) < 2:
        raise ValueError("intervals need labels of at least two problems")
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
    """Returns each number rounded to the nearest possible label, which is a whole number if all labels are whole."""
    if (labels == np.rint(labels)).all():
        return np.rint(judged)
    kinds: Values = np.unique(labels)
    rounded: Values = kinds[np.abs(judged[:, None] - kinds[None, :]).argmin(axis=1)]
    return rounded


def cohens_kappa(first: Values, second: Values) -> float:
    """Returns Cohen's kappa of two raters who gave each item a number; NaN if both always give the same number.

    Source: Cohen 1960, Educational and Psychological Measurement 20.
    Example: the raters agree on 3 of 4; by chance on 1/2 * 3/4 + 1/2 * 1/4 = 1/2.
        >>> cohens_kappa(np.array([1.0, 1, 0, 0]), np.array([1.0, 1, 1, 0]))
        0.5
    """
    agreed, by_chance = float((first == second).mean()), chance(first, second)
    return (agreed - by_chance) / (1 - by_chance) if by_chance < 1 else float("nan")


def weighted_kappa(first: Values, second: Values) -> float:
    """Returns kappa with squared differences as weights: 1 minus the mean squared difference, divided by that over all
    pairs of the raters' numbers.

    Source: Cohen 1968, Psychological Bulletin 70.
    Example: squares 0, 0, 1 have the mean 1/3; those of all nine pairs of (1, 2, 3) and (1, 2, 2) have 9/9.
        >>> round(weighted_kappa(np.array([1.0, 2, 3]), np.array([1.0, 2, 2])), 4)
        0.6667
    """
    by_chance = float(((first[:, None] - second[None, :]) ** 2).mean())
    return 1 - float(((first - second) ** 2).mean()) / by_chance if by_chance else float("nan")


def slope(of: Values, values: Values) -> float:
    """Returns the slope of the least-squares line; NaN if `of` does not vary."""
    centred = of - of.mean()
    spread = float((centred**2).sum())
    return float((centred * values).sum()) / spread if spread > 1e-12 else float("nan")


def chance(first: Values, second: Values) -> float:
    """Returns the share of items on which two independent raters agree if they use the numbers as often as these
    two."""
    kinds = np.union1d(first, second)
    return float(sum((first == kind).mean() * (second == kind).mean() for kind in kinds))


def _not_surer(kappa: Interval, agreement: Interval, by_chance: float) -> Interval:
    """Returns the interval of kappa. If no judgement differs from its label, the jackknife has no width; then the lower
    end follows from the agreement's."""
    if np.isnan(kappa.value) or kappa.high > kappa.low:
        return kappa
    return Interval(kappa.value, (agreement.low - by_chance) / (1 - by_chance), kappa.high)
