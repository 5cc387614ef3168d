"""Where training ended: each metric over the last steps, by groups of seeds, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipelines.report.evidence import Curve, Curves, Group
from pipelines.report.statistics import Interval, seed_difference, seed_mean
from specs.metrics import CHARTED, Metric

LAST_STEPS = 10
"""A training metric is compared by its mean over so many last steps."""
LEAST_SEEDS = 4
"""Whose mean of a metric gets an interval. Of fewer, Student's reaches far beyond anything that a seed gives: they are
shown themselves, and nothing is claimed of others."""


@dataclass(frozen=True, slots=True)
class FinalMetric:
    """One training metric of one group, and how it differs from the first group's."""

    metric: str
    label: str
    value: Interval
    """Mean over the seeds of each run's last steps. The interval is Student's over seeds, as far as the metric can be
    there; NaN for fewer than LEAST_SEEDS."""
    seeds: tuple[float, ...]
    """The figure of each seed."""
    against_first: Interval | None
    """None for the first group itself, and where nothing differs."""


def final_metrics(groups: Sequence[Group], curves: Curves, *, confidence: float = 0.95) -> list[FinalMetric]:
    """One entry for each metric that a report draws and each group that has it, in that order."""
    entries = []
    for charted in CHARTED:
        metric = charted.name
        first: list[float] = []
        for group in groups:
            figures = [
                _last_mean(curves[metric][run_id]) for run_id in group.run_ids if run_id in curves.get(metric, {})
            ]
            figures = [figure for figure in figures if math.isfinite(figure)]
            if figures:
                moves = max(first + figures) - min(first + figures) > 1e-9 * abs(figures[0])
                against = seed_difference(first, figures, confidence=confidence) if first and moves else None
                mean = _over_seeds(figures, charted, confidence)
                entries.append(FinalMetric(metric, group.label, mean, tuple(figures), against))
                first = first or figures
    return entries


def _over_seeds(figures: Sequence[float], metric: Metric, confidence: float) -> Interval:
    interval = seed_mean(figures, confidence=confidence)
    if len(figures) < LEAST_SEEDS:
        return replace(interval, low=math.nan, high=math.nan)
    return interval.within(metric.least, metric.most)


def _last_mean(curve: Curve) -> float:
    values = curve[-LAST_STEPS:, 1]
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else math.nan
