"""Results at the end of training, by group of seeds: each metric over the last steps, with intervals, and the
accuracies of the last and the best checkpoint, beside published figures as in papers' tables."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pipelines.home.home import Home
from pipelines.report.evidence import Curve, Curves, Group, Run
from pipelines.report.statistics import Interval, seed_difference, seed_mean
from specs.labels import is_called
from specs.metrics import CHARTED, Metric
from storage import Store

if TYPE_CHECKING:
    from specs.schema.evaluation import LiteratureTable

LAST_STEPS = 10
"""Number of last steps over which the mean of a training metric is compared."""
LEAST_SEEDS = 4
"""Smallest number of seeds for which the mean of a metric gets an interval. With fewer, Student's interval reaches far
beyond the value of any seed; then only the seeds' values are shown, without a claim on other seeds."""
_CHECKPOINTS = """
    SELECT run_id, dataset, any_value(metric), any_value(accuracy) FILTER (is_last),
           any_value(accuracy) FILTER (is_best OR step = 0), count(*)
    FROM accuracy_curves WHERE list_contains($trained, run_id) AND step > 0 OR list_contains($as_they_are, run_id)
    GROUP BY run_id, dataset
"""


@dataclass(frozen=True, slots=True)
class FinalMetric:
    """A training metric of one group, and its difference from the first group."""

    metric: str
    label: str
    value: Interval
    """Mean over the seeds of each run's last steps. The interval is Student's over seeds, cut to the metric's
    possible values; NaN for fewer than LEAST_SEEDS."""
    seeds: tuple[float, ...]
    """The value of each seed."""
    against_first: Interval | None
    """Difference from the first group; None for the first group itself, and if nothing differs."""


def final_metrics(groups: Sequence[Group], curves: Curves, *, confidence: float = 0.95) -> list[FinalMetric]:
    """Returns an entry for each metric that a report draws and each group that has the metric, in that order."""
    entries = []
    for charted in CHARTED:
        metric = charted.name
        first: list[float] = []
        for group in groups:
            figures = [
                _last_mean(curves[metric][run_id], charted)
                for run_id in group.run_ids
                if run_id in curves.get(metric, {})
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


def _last_mean(curve: Curve, metric: Metric) -> float:
    values = curve[-1 if metric.at_evaluations else -LAST_STEPS :, 1]
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else math.nan


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """One run's accuracy on one dataset after training began. For a model that is only measured, last and best are
    the same."""

    measure: str
    """mean@k."""
    last: float
    best: float
    count: int
    """Number of checkpoints among which the best was selected."""


@dataclass(frozen=True, slots=True)
class LiteratureComparison:
    """A group's accuracies on one dataset, with published figures of the same row."""

    label: str
    dataset: str
    measure: str
    """Our measure: mean@k; empty without an evaluation."""
    last: float | None
    """Our accuracy at each run's last checkpoint, as the mean over the seeds; None without an evaluation."""
    best: float | None
    """Our accuracy at each run's best checkpoint, as the mean over the seeds."""
    num_checkpoints: int
    """Number of checkpoints among which the best was selected, in the run that has the most."""
    num_seeds: int
    theirs_measure: str
    theirs_last: float
    theirs_best: float
    source: str
    """Source of the published figure."""
    remarks: str


def compare_with_literature(home: Home, store: Store, groups: Sequence[Group]) -> list[LiteratureComparison]:
    """Yields an entry for each published figure that the groups' experiments name, in the order of the groups."""
    runs = [run for group in groups for run in group.runs]
    by_kind = {
        "trained": [run.run_id for run in runs if run.trains],
        "as_they_are": [run.run_id for run in runs if not run.trains],
    }
    rows = store.query(_CHECKPOINTS, by_kind).rows
    evaluated = {(run_id, dataset): Checkpoints(*figures) for run_id, dataset, *figures in rows}
    return [beside for group in groups for beside in _of_group(group, _tables(home, group.runs[0]), evaluated)]


def _tables(home: Home, run: Run) -> "Sequence[LiteratureTable]":
    """Returns the published figures of the experiment's file as of its last execution, since figures may be added after
    all runs have ended. If the experiment has no record, returns those of the run's own spec."""
    from specs.reading.recorded import recorded_spec  # not at the top: the schema is slow to load

    directory = home.experiment(run.experiment)
    spec = recorded_spec(directory) if run.experiment and (directory / "spec.json").exists() else run.spec
    return spec.evaluation.literature


def _of_group(
    group: Group, tables: "Sequence[LiteratureTable]", evaluated: Mapping[tuple[str, str], Checkpoints]
) -> Iterator[LiteratureComparison]:
    for table in tables:
        row = next((row for label, row in table.rows.items() if is_called(group.label, label)), None)
        for dataset, (theirs_last, theirs_best) in zip(table.datasets, row or (), strict=row is not None):
            of_runs = [found for run_id in group.run_ids if (found := evaluated.get((run_id, dataset)))]
            yield LiteratureComparison(
                label=group.label,
                dataset=dataset,
                measure=of_runs[0].measure if of_runs else "",
                last=_mean_of([of_run.last for of_run in of_runs]),
                best=_mean_of([of_run.best for of_run in of_runs]),
                num_checkpoints=max((of_run.count for of_run in of_runs), default=0),
                num_seeds=len(of_runs),
                theirs_measure=table.measure,
                theirs_last=theirs_last,
                theirs_best=theirs_best,
                source=table.source,
                remarks=table.remarks,
            )


def _mean_of(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def notes_of(figures: Sequence[LiteratureComparison]) -> list[str]:
    """Returns the sources of the figures, and remarks on them, in sentences; empty without figures."""
    if not figures:
        return []
    theirs = dict.fromkeys(f"{figure.source} ({figure.theirs_measure})" for figure in figures)
    ours = dict.fromkeys(figure.measure for figure in figures if figure.measure)
    most = max(figure.num_checkpoints for figure in figures)
    optimism = (
        f"The best of up to {most} checkpoints is chosen on the problems that it is measured on, so it is too high,"
        " the more so the more checkpoints there are: compare the last checkpoints."
    )
    return [
        f"Theirs: {'; '.join(theirs)}.",
        f"Ours: {', '.join(ours) or 'not evaluated yet'}.",
        *([optimism] if most > 1 else []),
        *dict.fromkeys(figure.remarks for figure in figures if figure.remarks),
    ]
