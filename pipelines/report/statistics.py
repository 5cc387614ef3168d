"""The intervals of answers, by the name that notebooks and scripts import them from. See `rpg.statistics`."""

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
