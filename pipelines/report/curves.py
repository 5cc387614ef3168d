"""The learning curves of groups of runs that differ in the seed: each seed a faint line, their mean a strong one."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from pipelines.report.answer import Accuracy
from pipelines.report.charts import Line, Point, line_chart, number
from pipelines.report.evidence import Group
from specs.metrics import CHARTED

Curves = Mapping[str, Mapping[str, Sequence[Point]]]
"""Name of the metric -> run id -> points (step, value), see `evidence.metric_curves`."""


def learning_curves(groups: Sequence[Group], curves: Curves) -> tuple[list[Markup], list[str]]:
    """The charts of the metrics that change, and a note (`learning_rate 0.0001`) on each that never does."""
    charts, constant = [], []
    for metric in CHARTED:
        by_run = curves.get(metric.name, {})
        values = {point[1] for points in by_run.values() for point in points if math.isfinite(point[1])}
        if len(values) == 1:
            constant.append(f"{metric.name} {number(values.pop())}")
        elif values:
            charts.append(line_chart(_lines(groups, by_run), title=metric.heading))
    return charts, constant


def accuracy_curves(accuracies: Sequence[Accuracy]) -> list[Markup]:
    """A chart of each dataset on which some group was evaluated between its first and its last step too."""
    charts = []
    for dataset in dict.fromkeys(accuracy.dataset for accuracy in accuracies):
        drawn = [accuracy for accuracy in accuracies if accuracy.dataset == dataset]
        if any(len(accuracy.by_step) > 2 for accuracy in drawn):
            lines = [_accuracy_line(accuracy, color) for color, accuracy in enumerate(drawn)]
            charts.append(line_chart(lines, title=f"Accuracy on {dataset}"))
    return charts


def _accuracy_line(accuracy: Accuracy, color: int) -> Line:
    intervals = accuracy.by_step.items()
    return Line(
        [(step, interval.value) for step, interval in intervals],
        label=accuracy.label,
        color=color,
        band=(
            [(step, interval.low) for step, interval in intervals],
            [(step, interval.high) for step, interval in intervals],
        ),
    )


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over the curves at each step that all of them have."""
    by_step: dict[float, list[float]] = defaultdict(list)
    for points in curves:
        for step, value in points:
            by_step[step].append(value)
    return [(step, sum(values) / len(values)) for step, values in sorted(by_step.items()) if len(values) == len(curves)]


def _lines(groups: Sequence[Group], by_run: Mapping[str, Sequence[Point]]) -> list[Line]:
    lines: list[Line] = []
    for color, group in enumerate(groups):
        seeds = [by_run[run_id] for run_id in group.run_ids if run_id in by_run]
        if len(seeds) > 1:
            lines.extend(Line(points, color=color, faint=True) for points in seeds)
        if seeds:
            lines.append(Line(mean_curve(seeds), label=group.label, color=color))
    return lines
