"""Computes mean@k, pass@k, maj@k or score@k of a checkpoint, with intervals.

Pure functions on [problems, samples] tables; no torch.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rpg.statistics.intervals import mean_interval

Correct = NDArray[np.bool_]
"""Whether each response is right. [problems, samples]"""
PerProblem = NDArray[np.float64]

_MOST_SUBSETS = 1_000
"""Largest number of subsets of k out of n samples. If there are more, this many are drawn at random."""


@dataclass(frozen=True, slots=True)
class EvaluationMeasure:
    """The value of a metric on a set, with its interval."""

    metric: str
    """Name of the metric: mean@k, pass@k, maj@k or score@k."""
    value: float
    ci_low: float
    ci_high: float


def measures(
    correct: Correct,
    votes: Sequence[Sequence[Hashable | None]],
    *,
    confidence: float,
    seed: int,
    clusters: Sequence[object] | None = None,
) -> list[EvaluationMeasure]:
    """Returns every measure of one checkpoint on one set: mean@n, and pass@k and maj@k for k = 1, 2, 4, ... and n.

    Args:
        correct: [problems, samples].
        votes: answer of each response, in the same shape; None abstains.
        confidence: level of the intervals, in (0, 1).
        seed: seed of the subsets of maj@k if there are too many to use all.
        clusters: label of each problem's cluster; problems of one cluster are not independent.
    """
    num_samples = correct.shape[1]
    tables = {f"mean@{num_samples}": mean_at_k(correct)}
    tables |= {f"pass@{k}": pass_at_k(correct, k) for k in sizes(num_samples)}
    tables |= {f"maj@{k}": majority_at_k(correct, votes, k, seed=seed) for k in sizes(num_samples)}
    return [_measure(metric, values, confidence, clusters) for metric, values in tables.items()]


def score_measure(
    scores: PerProblem, *, confidence: float, clusters: Sequence[object] | None = None
) -> EvaluationMeasure:
    """Returns the measure of a graded reward: score@n, the mean of all scores.

    Args:
        scores: [problems, samples], any real numbers.
        confidence: level of the interval, in (0, 1).
        clusters: as for `measures`.
    """
    return _measure(f"score@{scores.shape[1]}", scores.mean(axis=1), confidence, clusters, shares=False)


def _measure(
    metric: str, values: PerProblem, confidence: float, clusters: Sequence[object] | None, *, shares: bool = True
) -> EvaluationMeasure:
    """Returns the mean over problems, with an interval for the same weights on new problems."""
    interval = mean_interval(values, confidence=confidence, clusters=clusters, shares=shares)
    return EvaluationMeasure(metric, interval.value, interval.low, interval.high)


def sizes(num_samples: int) -> list[int]:
    """Returns the powers of two below the number of samples, and that number.

    Example:
        >>> sizes(12)
        [1, 2, 4, 8, 12]
    """
    return [*itertools.takewhile(lambda k: k < num_samples, (2**power for power in itertools.count())), num_samples]


def mean_at_k(correct: Correct) -> PerProblem:
    """Returns each problem's share of right responses. [problems]"""
    return np.asarray(correct.mean(axis=1), dtype=np.float64)


def pass_at_k(correct: Correct, k: int) -> PerProblem:
    """Returns each problem's probability that at least one of k responses is right, estimated without bias. [problems]

    The estimate is 1 - C(n - c, k) / C(n, k) with c right ones among n samples: the share of subsets of k that contain
    a right one.
    Source: Chen 2021, arXiv:2107.03374, eq. 1.
    Example: of three responses one is right; two of the three pairs contain it.
        >>> round(pass_at_k(np.array([[True, False, False]]), 2).item(), 4)
        0.6667
    """
    num_samples = correct.shape[1]
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {num_samples}")
    misses = [math.comb(num_samples - int(right), k) for right in correct.sum(axis=1)]
    return 1 - np.array(misses, dtype=np.float64) / math.comb(num_samples, k)


def majority_at_k(correct: Correct, votes: Sequence[Sequence[Hashable | None]], k: int, *, seed: int) -> PerProblem:
    """Returns each problem's probability that the most frequent answer of k responses is right. [problems]

    It is the mean over subsets of k of the n samples: all subsets, or 1,000 drawn with `seed` if there are more. Tied
    answers count in equal parts; abstentions have no vote, and a subset of only abstentions is wrong. If a scorer
    judges responses with one answer differently, the answer counts as its share of right responses.
    Example: 7, 7 and 3 were answered and 7 is right: each pair has a 7, but two pairs are ties.
        >>> right = np.array([[True, True, False]])
        >>> round(majority_at_k(right, [["7", "7", "3"]], 2, seed=0).item(), 4)
        0.6667
    """
    num_samples = correct.shape[1]
    if not 1 <= k <= num_samples:
        raise ValueError(f"maj@{k} needs at least {k} samples, there are {num_samples}")
    subsets = _subsets(num_samples, k, seed)
    rows = [_majority(right, cast, subsets) for right, cast in zip(correct, votes, strict=True)]
    return np.array(rows, dtype=np.float64)


@lru_cache(maxsize=64)
def _subsets(num_samples: int, k: int, seed: int) -> NDArray[np.float64]:
    """Returns membership of samples in subsets: 1 if a subset contains the sample, else 0. [subsets, num_samples]"""
    if math.comb(num_samples, k) <= _MOST_SUBSETS:
        positions = np.array(list(itertools.combinations(range(num_samples), k)))
    else:
        generator = np.random.default_rng([seed, num_samples, k])
        positions = np.stack([generator.permutation(num_samples)[:k] for _ in range(_MOST_SUBSETS)])
    members = np.zeros((len(positions), num_samples))
    np.put_along_axis(members, positions, 1.0, axis=1)
    return members


def _majority(correct: NDArray[np.bool_], votes: Sequence[Hashable | None], subsets: NDArray[np.float64]) -> float:
    answers = {vote: index for index, vote in enumerate(dict.fromkeys(vote for vote in votes if vote is not None))}
    if not answers:
        return 0.0
    ballots = np.zeros((len(votes), len(answers)))
    for sample, vote in enumerate(votes):
        if vote is not None:
            ballots[sample, answers[vote]] = 1.0
    rightness = (ballots * correct[:, None]).sum(axis=0) / ballots.sum(axis=0)
    counts = subsets @ ballots  # [subsets, answers]
    most = counts.max(axis=1, keepdims=True)
    winners = (counts == most) & (most > 0)
    shares = (winners * rightness).sum(axis=1) / np.maximum(winners.sum(axis=1), 1)
    return float(shares.mean())


def ratio_values(totals: PerProblem, sizes: PerProblem) -> PerProblem:
    """Returns a value for each problem. The mean of these values is the sum of the totals over the sum of the sizes,
    and their spread gives the interval of that ratio (the delta method). [problems]

    Args:
        totals: such as nats, or bits. [problems]
        sizes: such as tokens, or bytes. [problems]
    Example: 3 nats over 6 tokens are half a nat a token, with both problems.
        >>> ratio_values(np.array([1.0, 2.0]), np.array([2.0, 4.0])).tolist()
        [0.5, 0.5]
    """
    ratio = totals.sum() / sizes.sum()
    values: PerProblem = ratio + (totals - ratio * sizes) / sizes.mean()
    return values
