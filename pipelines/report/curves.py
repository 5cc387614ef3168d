"""The learning curves of groups of seeds: each seed a faint line, the mean of the group a strong one."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from pipelines.report.charts import Line, Point, line_chart, number
from pipelines.report.evidence import Group

TITLES = {
    "reward/mean": "Reward, mean of a step",
    "kl/reverse": "KL(policy || reference), nats",
    "kl/forward": "KL(reference || policy), nats",
    "weight/variance": "Variance of a token's gradient weight",
    "entropy": "Entropy, nats a token",
    "clip_fraction/high": "Clipped above, share of tokens",
    "clip_fraction/low": "Clipped below, share of tokens",
    "clip_fraction/dual": "Clipped by the dual bound, share of tokens",
    "response_length/mean": "Response length, tokens",
    "truncated_fraction": "Cut off at the maximum length, share",
    "zero_std_fraction": "Groups without a signal, share",
    "grad_norm": "Gradient norm before clipping",
    "ratio/max": "Largest importance ratio",
    "ratio/ess": "Effective sample size, share",
    "kl/behaviour": "KL to the sampling policy, nats",
    "sentinel/difference": "Engine and learner apart on the probe, nats",
    "reference/age_steps": "Age of the reference, steps",
    "learning_rate": "Learning rate",
    "time/step": "Time of a step, seconds",
    "tokens_per_second/rollout": "Sampling, tokens a second",
    "tokens_per_second/train": "Training, tokens a second",
    "memory/peak_gib": "Peak memory, GiB",
}
"""The metrics that a report draws, in its order; names as in the SQL table."""

Curves = Mapping[str, Mapping[str, Sequence[Point]]]
"""metric -> run_id -> points, see `evidence.metric_curves`."""


def learning_curves(groups: Sequence[Group], curves: Curves) -> tuple[list[Markup], list[str]]:
    """A chart per metric that moves, and a note (`learning_rate 0.0001`) for each that never does."""
    charts, flat = [], []
    for metric, title in TITLES.items():
        by_run = curves.get(metric, {})
        values = {point[1] for points in by_run.values() for point in points if math.isfinite(point[1])}
        if len(values) == 1:
            flat.append(f"{metric} {number(values.pop())}")
        elif values:
            charts.append(line_chart(_lines(groups, by_run), title=title))
    return charts, flat


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
        held = [by_run[run_id] for run_id in group.run_ids if run_id in by_run]
        if len(held) > 1:
            lines.extend(Line(points, color=color, faint=True) for points in held)
        if held:
            lines.append(Line(mean_curve(held), label=group.label, color=color))
    return lines
