"""The public name, for notebooks and scripts, of the functions that compute intervals. See `rpg.statistics`."""

from rpg.statistics import (
    NEW_SEEDS,
    THESE_WEIGHTS,
    Interval,
    Spread,
    Verdict,
    arms_against_first,
    gain_interval,
    level,
    mean_interval,
    seed_difference,
    seed_mean,
    spread_of,
    verdict,
)

__all__ = [
    "NEW_SEEDS",
    "THESE_WEIGHTS",
    "Interval",
    "Spread",
    "Verdict",
    "arms_against_first",
    "gain_interval",
    "level",
    "mean_interval",
    "seed_difference",
    "seed_mean",
    "spread_of",
    "verdict",
]
