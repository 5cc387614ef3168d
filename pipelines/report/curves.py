"""The learning curves of groups of runs that differ in the seed. Few seeds are drawn one by one, many as mean and
interval."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pipelines.report.answer import Accuracy
from pipelines.report.charts import Chart, Row, line, line_chart, number, thin
from pipelines.report.endings import LEAST_SEEDS
from pipelines.report.evidence import Curve, Curves
from pipelines.report.palette import DrawnGroup
from pipelines.report.statistics import Interval, seed_mean
from specs.metrics import CHARTED, Metric

_CROWD = 3
"""Number of groups above which each step's noise hides the curves of a chart."""
_POINTS_IN_A_CROWD = 60


def most_points(drawn: Sequence[DrawnGroup]) -> int:
    """Returns the largest number of points of a learning curve. If many groups share a chart, longer curves are
    averaged to this number. 0 means no averaging."""
    return _POINTS_IN_A_CROWD if len(drawn) > _CROWD else 0


def learning_curves(
    drawn: Sequence[DrawnGroup], curves: Curves, *, confidence: float
) -> tuple[list[Chart], dict[str, Chart]]:
    """Returns the charts of the metrics that change, and those of constant metrics, by a note such as `learning_rate
    0.0001`."""
    charts, constant = [], {}
    for metric in CHARTED:
        by_run = curves.get(metric.name, {})
        values = np.concatenate([np.empty(0), *(curve[:, 1] for curve in by_run.values())])
        values = values[np.isfinite(values)]
        if not values.size:
            continue
        lines = [one for each in drawn for one in _lines(each, metric, by_run, confidence, most_points(drawn))]
        chart = line_chart(lines, title=metric.heading, name=metric.name, key=drawn[0].group.key)
        if chart is None:
            continue
        if values.min() == values.max():
            constant[f"{metric.name} {number(float(values[0]))}"] = chart
        else:
            charts.append(chart)
    return charts, constant


def accuracy_curves(accuracies: Sequence[Accuracy], drawn: Sequence[DrawnGroup]) -> list[Chart]:
    """Returns a chart for each dataset that was evaluated between a group's first and last step."""
    charts = []
    shown = {each.group.label: each for each in drawn}
    for dataset, measure in dict.fromkeys((accuracy.dataset, accuracy.measure) for accuracy in accuracies):
        held = [accuracy for accuracy in accuracies if (accuracy.dataset, accuracy.measure) == (dataset, measure)]
        if any(len(accuracy.by_step) > 2 for accuracy in held):
            lines = [_accuracy_line(accuracy, shown[accuracy.label]) for accuracy in held]
            name, title = f"{measure}/{dataset}/steps", f"{measure.capitalize()} on {dataset}"
            charts.append(line_chart(lines, title=title, name=name, key=drawn[0].group.key))
    return [chart for chart in charts if chart]


def _accuracy_line(accuracy: Accuracy, drawn: DrawnGroup) -> Row:
    points = [(float(step), interval.value) for step, interval in accuracy.by_step.items()]
    if drawn.pale:
        return line(points, color=drawn.color, faint=True)
    return line(points, label=accuracy.label, color=drawn.color, bands=[_band(list(accuracy.by_step.values()))])


def _band(intervals: Sequence[Interval]) -> tuple[list[float], list[float]]:
    return [interval.low for interval in intervals], [interval.high for interval in intervals]


def _lines(drawn: DrawnGroup, metric: Metric, by_run: Mapping[str, Curve], confidence: float, most: int) -> list[Row]:
    """Returns the lines of one metric: the mean over the seeds, with its interval or with a line for each seed.

    Args:
        most: a longer curve is averaged to this number of points; 0 draws it unchanged.
    """
    seeds = [by_run[run_id] for run_id in drawn.group.run_ids if run_id in by_run]
    steps, values = _on_shared_steps(seeds, most)
    if not steps.size:
        return []
    mean = np.column_stack([steps, values.mean(axis=0)])
    label, color = drawn.group.label, drawn.color
    if drawn.pale:
        return [line(mean, color=color, faint=True)]
    if len(seeds) < LEAST_SEEDS:
        single = [np.column_stack([steps, row]) for row in values] if len(seeds) > 1 else []
        return [*(line(curve, color=color, faint=True) for curve in single), line(mean, label=label, color=color)]
    kept = thin(mean)
    intervals = [
        seed_mean(values[:, steps == step].ravel(), confidence=confidence).within(metric.least, metric.most)
        for step in kept[:, 0]
    ]
    return [line(kept, label=label, color=color, bands=[_band(intervals)])]


def _on_shared_steps(seeds: Sequence[Curve], most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the steps that all seeds have [points], and the seeds' values there [seeds, points]. If there are more
    than `most` steps, neighbours are averaged."""
    if not seeds:
        return np.empty(0), np.empty((0, 0))
    steps = seeds[0][:, 0]
    for curve in seeds[1:]:
        steps = np.intersect1d(steps, curve[:, 0])
    table = np.array([steps, *(curve[np.isin(curve[:, 0], steps), 1] for curve in seeds)])
    if most and steps.size > most:
        table = np.column_stack([part.mean(axis=1) for part in np.array_split(table, most, axis=1)])
    return table[0], table[1:]
