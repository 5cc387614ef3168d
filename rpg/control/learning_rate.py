"""The learning rate over optimizer updates."""

import math
from typing import assert_never

from specs.schema.training import Schedule


def learning_rate(schedule: Schedule, *, peak: float, update: int, num_updates: int) -> float:
    """Returns the learning rate of one update: a linear rise, then constant or a decay that reaches 0 after the last
    update.

    Args:
        peak: the optimizer's learning rate.
        update: index of the update, from 0.
        num_updates: updates of the whole run.
    Example: the second of two warm-up updates runs at the peak.
        >>> learning_rate(Schedule(warmup_updates=2), peak=1.0, update=1, num_updates=10)
        1.0
    """
    if update < schedule.warmup_updates:
        return peak * (update + 1) / schedule.warmup_updates
    progress = (update - schedule.warmup_updates) / max(1, num_updates - schedule.warmup_updates)
    match schedule.type:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - progress)
        case "cosine":
            return peak * (1 + math.cos(math.pi * progress)) / 2
        case never:
            assert_never(never)
