"""Outlying seeds: seeds of an arm whose results the other seeds do not explain, such as a training run that
collapsed."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rpg.statistics.variance import as_table, residual_variance

LEVEL = 0.01
"""Probability that a seed of an arm is reported as an outlier if all seeds are drawn from one normal distribution."""


@dataclass(frozen=True, slots=True)
class SeedApart:
    """A seed that is an outlier, with the range of the other seeds."""

    value: float
    """Mean of the outlying seed."""
    least: float
    """Least mean of the other seeds."""
    most: float
    """Largest mean of the other seeds."""
    num_others: int


def seed_apart(scores: ArrayLike, *, level: float = LEVEL) -> SeedApart | None:
    """Returns the seed of an arm that is an outlier; None if no seed is, or if there are fewer than three.

    The test is Grubbs's: each seed's mean is compared with the mean and the spread of the other seeds, by Student's t
    with two degrees of freedom fewer than seeds, at `level` over the number of seeds. The seed itself does not count in
    that spread, so that it cannot hide itself. The spread is at least the noise of the problems' scores.

    Args:
        scores: [seeds, problems], or [seeds, 1] with one figure per seed.
        level: chance of a false alarm.
    Source: Grubbs 1950, Sample Criteria for Testing Outlying Observations.
    Example: four seeds near 0.5, and one that collapsed.
        >>> seed_apart([[0.50], [0.51], [0.49], [0.50], [0.02]])
        SeedApart(value=0.02, least=0.49, most=0.51, num_others=4)
    """
    from scipy import special

    table = as_table(scores, "scores")
    means, seeds = table.mean(axis=1), len(table)
    if seeds < 3:
        return None
    others = np.array([np.delete(means, seed) for seed in range(seeds)])
    noise = residual_variance([table]) / table.shape[1]
    spread = np.sqrt(np.maximum(others.var(axis=1, ddof=1), noise) * (1 + 1 / (seeds - 1)))
    gaps = np.abs(means - others.mean(axis=1))
    farthest = int(np.argmax(gaps))
    if gaps[farthest] <= special.stdtrit(seeds - 2, 1 - level / seeds / 2) * spread[farthest] + 1e-12:
        return None
    rest = others[farthest]
    return SeedApart(float(means[farthest]), float(rest.min()), float(rest.max()), seeds - 1)
