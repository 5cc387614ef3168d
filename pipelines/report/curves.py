"""The learning curves of groups of runs that differ in the seed: each seed a faint line, their mean a strong one."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from markupsafe import Markup

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
