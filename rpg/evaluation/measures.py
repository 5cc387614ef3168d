"""mean@k, pass@k, maj@k or score@k of a checkpoint, with intervals.

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
"""[problems, samples]: which responses are right."""
PerProblem = NDArray[np.float64]

_MOST_SUBSETS = 1_000
"""Most subsets of n samples taken k at a time: all of them up to so many, else so many drawn at random."""


@dataclass(frozen=True, slots=True)
class EvaluationMeasure:
    """A metric's value on a set, and its interval."""

    metric: str
    """mean@k, pass@k, maj@k or score@k."""
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
    """Every measure of one checkpoint on one set: mean@n, and pass@k and maj@k for k = 1, 2, 4, ... and n.

    Args:
        correct: [problems, samples].
        votes: what each response answers, the same shape; None abstains.
        confidence: level of the intervals, in (0, 1).
        seed: of the subsets of maj@k where there are too many to take all.
        clusters: a label for each problem; problems of one cluster are not independent.
    """
    num_samples = correct.shape[1]
    tables = {f"mean@{num_samples}": mean_at_k(correct)}
    tables |= {f"pass@{k}": pass_at_k(correct, k) for k in sizes(num_samples)}
    tables |= {f"maj@{k}": majority_at_k(correct, votes, k, seed=seed) for k in sizes(num_samples)}
    return [_measure(metric, values, confidence, clusters) for metric, values in tables.items()]


def score_measure(
    scores: PerProblem, *, confidence: float, clusters: Sequence[object] | None = None
) -> EvaluationMeasure:
    """The measure of a graded reward: score@n, the mean of all scores.

    Args:
        scores: [problems, samples], any real numbers.
        confidence: level of the interval, in (0, 1).
        clusters: as for `measures`.
    """
    return _measure(f"score@{scores.shape[1]}", scores.mean(axis=1), confidence, clusters, shares=False)


def _measure(
    metric: str, values: PerProblem, confidence: float, clusters: Sequence[object] | None, *, shares: bool = True
) -> EvaluationMeasure:
    """The mean over problems; its interval is for these weights on new problems."""
    interval = mean_interval(values, confidence=confidence, clusters=clusters, shares=shares)
    return EvaluationMeasure(metric, interval.value, interval.low, interval.high)


def sizes(num_samples: int) -> list[int]:
    """1, 2, 4, ... below the number of samples, and that number.

    Example:
        >>> sizes(12)
        [1, 2, 4, 8, 12]
    """
    return [*itertools.takewhile(lambda k: k < num_samples, (2**power for power in itertools.count())), num_samples]


def mean_at_k(correct: Correct) -> PerProblem:
    """Each problem's share of right responses: [problems]."""
    return np.asarray(correct.mean(axis=1), dtype=np.float64)


def pass_at_k(correct: Correct, k: int) -> PerProblem:
    """Each problem's chance that at least one of k responses is right: [problems], an unbiased estimate.

    1 - C(n - c, k) / C(n, k), with c right ones among n samples: the share of subsets of k that hold a right one.
    Source: Chen 2021, arXiv:2107.03374, eq. 1.
    Example: of three responses one is right; two of the three pairs hold it.
        >>> round(pass_at_k(np.array([[True, False, False]]), 2).item(), 4)
        0.6667
    """
    num_samples = correct.shape[1]
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {num_samples}")
    misses = [math.comb(num_samples - int(right), k) for right in correct.sum(axis=1)]
    return 1 - np.array(misses, dtype=np.float64) / math.comb(num_samples, k)


def majority_at_k(correct: Correct, votes: Sequence[Sequence[Hashable | None]], k: int, *, seed: int) -> PerProblem:
    """Each problem's chance that the most frequent answer of k responses is right: [problems].

    The mean over subsets of k of the n samples: all subsets, or 1,000 drawn with `seed` where there are more. Answers
    that tie count in equal parts; abstentions have no vote, and a subset of abstentions is wrong. Where a scorer judges
    responses of one answer differently, the answer counts as its share of right responses.
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
    """[subsets, num_samples]: 1 where a subset has a sample."""
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
