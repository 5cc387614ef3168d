"""Comparison of several arms: which arms differ, whether one is best, and the sentence that reports it.

All pairs of arms are compared, with simultaneous intervals: in `confidence` of all experiments no reported difference
is wrong (Tukey and Kramer). The best arm is the one that is shown to be better than each other arm. That claim alone
needs a smaller family: if two arms are equally good and no other is better, only that pair can produce a false best. So
each of its differences is tested at half the error of one pair, if that gives the narrower interval.

A pair counts as though each of its arms had as many seeds as the one with fewer. So more seeds of one arm never widen
an interval, and an arm with few seeds that differ much is not hidden behind one with many that agree. The variance of a
seed is averaged over the pair and over those other arms with which the average has most degrees of freedom, see
`_pooled`. A pair whose own seeds differ more counts with its own variance. A pair whose two spreads differ by an F test
at 5 % has Welch's degrees of freedom. Two seeds cannot show whether spreads are alike: if an arm of a pair has two
seeds, the pair counts with its own spread and with one degree of freedom, a little more if the other arm has more
seeds.

Repeated analyses as seeds come in raise the chance of a false claim. The first analysis has the requested level, and
each further one a small share of its error; see `level`.

Source: Tukey 1953; Kramer 1956; Satterthwaite 1946; Welch 1947; the best as a test of intersections, Berger 1982. The
share of false sentences was measured by simulation: benchmarks/coverage.py.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rpg.statistics.apart import LEVEL, seed_apart
from rpg.statistics.factors import student, tukey
from rpg.statistics.variance import (
    NEW_SEEDS,
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
    spread_with_failures,
    unseen_moves,
)
from rpg.statistics.wording import Arm, sentence

ALIKE = 0.05
"""Level of the F test that decides whether two arms use the degrees of freedom of all arms."""
_LATER_LOOKS = 0.3
"""Error of the second analysis as a share of the first analysis's error; see `level`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on several arms."""

    best: str | None
    """Label of the arm that is shown to be better than every other arm; None if there is no such arm."""
    differences: tuple[tuple[str, str, Interval], ...]
    """Pairs that are shown to differ: the better arm, the worse arm, and the interval of their difference, which
    excludes 0."""
    text: str
    """The sentence or sentences for a headline."""
    arms: tuple[Arm, ...]
    """The arms, in the order given."""
    pairs: Mapping[tuple[str, str], Interval]
    """Interval of every pair, the first arm minus the second. The intervals of all pairs hold simultaneously."""

    def over(self, one: str, other: str) -> Interval:
        """Returns the interval of one arm minus another, from `differences` if the two differ, else from `pairs`."""
        for better, worse, interval in self.differences:
            if {better, worse} == {one, other}:
                return interval if better == one else _turned(interval)
        return self.pairs[one, other] if (one, other) in self.pairs else _turned(self.pairs[other, one])

    def tells(self, one: str, other: str) -> bool:
        """Returns whether two arms are shown to differ."""
        return any({one, other} == {better, worse} for better, worse, _ in self.differences)


@dataclass(frozen=True, slots=True)
class _Arms:
    """Tables of all arms, with failed seeds at the worst value."""

    labels: tuple[str, ...]
    tables: tuple[Table, ...]
    """[seeds, problems], or [seeds, clusters]"""
    failed: tuple[int, ...]
    shares: bool
    figures: bool
    """Whether each seed has only one figure, so that there is no sample of problems."""
    trained: bool
    worst: float


def verdict(
    arms: Mapping[str, ArrayLike],
    looks: Sequence[float] = (),
    confidence: float = 0.95,
    clusters: Sequence[object] | None = None,
    worst: float = 0.0,
    *,
    higher_is_better: bool = True,
    trained: bool = True,
    figures: bool = False,
    shares: bool | None = None,
) -> Verdict:
    """Returns the verdict on arms that were all measured on the same problems after the same number of steps.

    Args:
        arms: label -> scores [seeds, problems]; a row of NaN is a seed that failed.
        looks: numbers of seeds at the earlier analyses; if arms had unequal numbers, their mean.
        confidence: share of all experiments without a false claim, in (0, 1).
        clusters: a label for each problem; problems of one cluster are not independent.
        worst: the measure's worst value, with which a failed seed counts.
        higher_is_better: whether the larger score is the better one.
        trained: false for models that were not trained here: each has one row, and claims hold for these weights.
        figures: scores are [seeds, 1], a figure of training of which each seed has one.
        shares: whether the scores are shares, reported in percent and points. None: true if all are in [0, 1].
    Raises:
        ValueError: no arms, different problems, a seed with some scores missing, or an infinite score.
    Example: three seeds, and a gap that neither the variance between seeds nor the choice of problems explains.
        >>> problems = np.linspace(0.2, 0.6, 100)
        >>> low, high = ([problems + luck + gap for luck in (-0.01, 0.0, 0.01)] for gap in (0.0, 0.2))
        >>> found = verdict({"dapo": low, "rpg": high})
        >>> found.best, len(found.differences)
        ('rpg', 1)
    """
    read = _read(arms, clusters, worst, trained=trained, figures=figures, shares=shares)
    sign = 1 if higher_is_better else -1
    # One seed claims nothing, so an analysis with one seed had no chance of a false claim.
    before = sorted({look for look in looks if 1 < look < max(map(len, read.tables))})
    at = level(confidence, len(before))
    pairs, narrow = _intervals(read, at)
    best = _best(read, narrow, sign)
    told = {pair: interval for pair, interval in pairs.items() if interval.excludes(0)}
    if best is not None:
        # If the family of the best is the smaller one, its intervals are the narrower.
        told |= {pair: narrow[pair] for pair in narrow if best in pair and pair not in told}
    alarm = LEVEL / len(read.tables)
    rows = tuple(
        Arm(label, float(table.mean()), len(table), failed, None if failed else seed_apart(table, level=alarm))
        for label, table, failed in zip(read.labels, read.tables, read.failed, strict=True)
    )
    differences = tuple(
        (one, other, interval) if sign * interval.value > 0 else (other, one, _turned(interval))
        for (one, other), interval in sorted(told.items(), key=lambda item: -abs(item[1].value))
    )
    text = sentence(
        rows,
        best,
        differences,
        pairs,
        shares=read.shares,
        sign=sign,
        trained=trained,
        worst=worst,
        level=at,
        looks=before,
    )
    return Verdict(best, differences, text, rows, pairs)


def level(confidence: float, looks: int) -> float:
    """Returns the confidence level of an analysis after `looks` earlier ones with fewer seeds.

    The first analysis has the error 1 - confidence. The j-th after it has the share 0.3 / j^1.5 of that, so that all
    analyses together make at most 7 % false claims if the first makes 5 % (benchmarks/coverage.py).
    """
    return 1 - (1 - confidence) * (_LATER_LOOKS / looks**1.5 if looks else 1.0)


def _read(
    arms: Mapping[str, ArrayLike],
    clusters: Sequence[object] | None,
    worst: float,
    *,
    trained: bool,
    figures: bool,
    shares: bool | None,
) -> _Arms:
    tables, failed = [], []
    for label, scores in arms.items():
        table = np.atleast_2d(np.asarray(scores, dtype=np.float64))
        missing = np.isnan(table)
        lost = missing.all(axis=1) if table.size else np.zeros(0, dtype=bool)
        if missing.any(axis=1).sum() > lost.sum():
            raise ValueError(f"{label}: a seed has scores of some problems but not of others")
        failed.append(int(lost.sum()))
        tables.append(as_table(np.where(missing, worst, table), label))
    if not tables:
        raise ValueError("no arms: a verdict needs at least one")
    if len({table.shape[1] for table in tables}) > 1:
        shapes = ", ".join(f"{label} {table.shape}" for label, table in zip(arms, tables, strict=True))
        raise ValueError(f"the arms are not about the same problems: {shapes}")
    if shares is None:
        shares = are_shares(*tables) and not figures
    if clusters is not None:
        tables = [by_cluster(table, clusters) for table in tables]
    return _Arms(tuple(arms), tuple(tables), tuple(failed), shares, figures, trained, worst)


Pairs = dict[tuple[str, str], Interval]


def _intervals(arms: _Arms, confidence: float) -> tuple[Pairs, Pairs]:
    """Returns two intervals for each pair, the first arm minus the second: one with the width for the family of all
    pairs, and one with the width for the differences of a best arm."""
    whole = [table for table, failed in zip(arms.tables, arms.failed, strict=True) if not failed]
    spreads = [None if failed else spread_of([table]) for table, failed in zip(arms.tables, arms.failed, strict=True)]
    problems = _of_problems(whole) if whole else _Problems(0.0, 1.0, 0.0)
    together: Pairs = {}
    narrow: Pairs = {}
    for one, other in itertools.combinations(range(len(arms.tables)), 2):
        pair = (arms.tables[one], arms.tables[other])
        names = (arms.labels[one], arms.labels[other])
        value = float(pair[0].mean() - pair[1].mean())
        holds_for = NEW_SEEDS if min(map(len, pair)) > 1 else THESE_WEIGHTS
        half = narrower = math.nan
        if not arms.trained or holds_for == NEW_SEEDS:
            failed = (arms.failed[one], arms.failed[other])
            # An arm that lost seeds varies in its own way: it is compared with each other arm separately from the rest.
            if any(failed):
                variance = _variance(arms, pair, _of_problems(pair), _of_lost(pair, failed, arms.worst))
            else:
                variance = _variance(arms, pair, problems, _of_seeds(spreads, one, other))
            half = variance.half_width(lambda freedom: tukey(len(arms.tables), _rounded(freedom), confidence))
            narrower = min(half, variance.half_width(lambda freedom: student(freedom, (1 + confidence) / 2)))
        together[names], narrow[names] = (
            _possible(Interval(value, value - width, value + width, holds_for), arms) for width in (half, narrower)
        )
    return together, narrow


def _possible(interval: Interval, arms: _Arms) -> Interval:
    """Returns the possible part of a difference's interval. Two shares are never more than 1 apart."""
    return interval.within(-1, 1) if arms.shares else interval


BySeeds = tuple[float, float]
"""Contribution of the seeds to a difference's variance, and its degrees of freedom."""


@dataclass(frozen=True, slots=True)
class _Problems:
    """Contribution of problems to the variance of a difference, pooled over arms."""

    variance: float
    freedom: float
    residual: float


def _of_problems(pool: Sequence[Table]) -> _Problems:
    return _Problems(*arm_by_problem(pool), residual_variance(pool))


def _variance(arms: _Arms, pair: Sequence[Table], pooled: _Problems, by_seed: BySeeds) -> Variance:
    """Returns the variance of the difference of two arms' means."""
    if arms.figures:
        return Variance(*by_seed, by_problem=0.0, problem_freedom=math.inf, noise=0.0, unseen=0.0)
    problems = pair[0].shape[1]
    moves = pair[0].mean(axis=0) - pair[1].mean(axis=0)
    return Variance(
        *by_seed,
        by_problem=2 * pooled.variance / problems,
        problem_freedom=pooled.freedom,
        noise=pooled.residual * sum(1 / len(table) for table in pair) / problems,
        unseen=unseen_moves(moves) if arms.shares else 0.0,
    )


def _of_seeds(spreads: Sequence[Spread | None], one: int, other: int) -> BySeeds:
    """Returns the variance from the seeds of two arms without failed seeds.

    Args:
        spreads: spreads of all arms; None for those that lost seeds.
        one, other: the indices of the two arms.
    """
    known = [spread for place, spread in enumerate(spreads) if spread and spread.freedom and place not in (one, other)]
    pair = [spread for spread in (spreads[one], spreads[other]) if spread]
    fewest = min(spread.freedom for spread in pair)
    alone = sum(spread.variance for spread in pair) / 2
    if not fewest or not alone:
        return 0.0, max(fewest, 1)
    if fewest == 1:
        return alone, math.sqrt(2 / sum(1 / spread.freedom for spread in pair))
    average, freedom = _pooled(pair, known, fewest)
    if not _are_alike(*pair):
        welch = (2 * alone) ** 2 / sum(spread.variance**2 / spread.freedom for spread in pair)
        freedom = min(freedom, welch)
    return max(average, alone) * 2 / (fewest + 1), freedom


def _pooled(pair: Sequence[Spread], others: Sequence[Spread], fewest: int) -> BySeeds:
    """Returns the average of a seed's variance over a pair and further arms, and its degrees of freedom.

    Each arm has the same weight, whatever its number of seeds: arms may differ in spread. Arms are added in the order
    of their numbers of seeds, the largest first, as long as the degrees of freedom by Satterthwaite increase. An arm
    counts with at most as many seeds as the pair's smaller arm has.

    Args:
        fewest: degrees of freedom of the pair's smaller arm.
    """
    arms = [*pair, *sorted(others, key=lambda spread: -spread.freedom)]
    counted = [1 / min(spread.freedom, fewest) for spread in arms]
    freedom, number = max((number**2 / sum(counted[:number]), number) for number in range(2, len(arms) + 1))
    return sum(spread.variance for spread in arms[:number]) / number, freedom


def _of_lost(pair: Sequence[Table], failed: Sequence[int], worst: float) -> BySeeds:
    """Returns the variance from the seeds of two arms if some seeds failed."""
    reach = max(float(abs(table.mean(axis=1) - worst).max()) for table in pair)
    own = [
        spread_with_failures(table, lost, reach).variance / len(table) for table, lost in zip(pair, failed, strict=True)
    ]
    return sum(own), min(map(len, pair)) - 1


def _are_alike(one: Spread, other: Spread) -> bool:
    """Returns whether a two-sided F test at the level ALIKE does not reject equal spreads of two arms."""
    from scipy import special

    larger, smaller = sorted((one, other), key=lambda spread: -spread.variance)
    if not smaller.variance:
        return False
    beyond = special.fdtrc(larger.freedom, smaller.freedom, larger.variance / smaller.variance)
    return bool(2 * beyond > ALIKE)


def _best(arms: _Arms, pairs: Pairs, sign: int) -> str | None:
    """Returns the arm that is shown to be better than each other arm; None if no arm is."""
    for label in arms.labels:
        against = [(one == label) * 2 - 1 for one, other in pairs if label in (one, other)]
        held = [interval for names, interval in pairs.items() if label in names]
        ahead = (i.excludes(0) and side * sign * i.value > 0 for side, i in zip(against, held, strict=True))
        if held and all(ahead):
            return label
    return None


def _turned(interval: Interval) -> Interval:
    return Interval(-interval.value, -interval.high, -interval.low, interval.holds_for)


def _rounded(freedom: float) -> float:
    """Returns degrees of freedom, rounded down to a tenth so that the pairs of a page share cached factors."""
    return freedom if math.isinf(freedom) else max(math.floor(freedom * 10 + 1e-6) / 10, 1.0)
