"""Two or more runs or groups of seeds side by side: where their specs differ, and what came out, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.home import Home
from pipelines.report import evidence
from pipelines.report.answer import Outcome, outcomes
from pipelines.report.curves import TITLES, Curves
from pipelines.report.evidence import Group
from pipelines.statistics import Interval, seed_difference, seed_mean
from storage import Store

LAST_STEPS = 10
"""A training metric is compared by its mean over so many last steps."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One training metric of one group, and how it differs from the first group's."""

    metric: str
    label: str
    value: Interval
    """Mean over the seeds of each run's last steps; the interval is Student's over seeds, NaN for one seed."""
    against_first: Interval | None
    """None for the first group itself, and where nothing differs."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first group is the one that the others are held against."""

    groups: tuple[Group, ...]
    spec: dict[str, list[Any]]
    """Fields that differ: path -> one value per group."""
    outcomes: tuple[Outcome, ...]
    """Accuracy on the evaluation sets."""
    measures: tuple[Measure, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data; where there is no interval its ends are NaN."""
        groups = [
            {"label": group.label, "runs": group.run_ids, "seeds": [run.seed for run in group.runs]}
            for group in self.groups
        ]
        return {
            "groups": groups,
            "spec": self.spec,
            "accuracy": [asdict(outcome) for outcome in self.outcomes],
            "metrics": [asdict(measure) for measure in self.measures],
        }


def compare(home: Home, names: Sequence[str]) -> Comparison:
    """Holds runs and experiments against each other; each cell of an experiment's matrix is a group of its own.

    Raises:
        RpgError: a name stands for nothing, or for several runs.
    """
    groups = _distinct([group for name in names for group in evidence.find_groups(home, name)])
    run_ids = [run.run_id for group in groups for run in group.runs]
    confidence = groups[0].runs[0].spec.get("evaluation", {}).get("confidence", 0.95)
    with Store.open(home.root) as store:
        results = outcomes(groups, evidence.accuracies(store, run_ids), confidence=confidence)
        curves = evidence.metric_curves(store, run_ids)
    spec = evidence.differences([group.runs[0].spec for group in groups])
    return Comparison(tuple(groups), spec, tuple(results), tuple(_measures(groups, curves, confidence)))


def _measures(groups: Sequence[Group], curves: Curves, confidence: float) -> list[Measure]:
    measures = []
    for metric in TITLES:
        first: list[float] = []
        for group in groups:
            figures = [_ending(curves[metric][run_id]) for run_id in group.run_ids if run_id in curves.get(metric, {})]
            figures = [figure for figure in figures if math.isfinite(figure)]
            if figures:
                moves = max(first + figures) - min(first + figures) > 1e-9 * abs(figures[0])
                against = seed_difference(first, figures, confidence=confidence) if first and moves else None
                measures.append(Measure(metric, group.label, seed_mean(figures, confidence=confidence), against))
                first = first or figures
    return measures


def _ending(points: Sequence[tuple[float, float]]) -> float:
    values = [value for _, value in points[-LAST_STEPS:] if math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


def _distinct(groups: Sequence[Group]) -> list[Group]:
    """The groups with labels that tell them apart."""
    labels = [group.label for group in groups]
    return [
        group
        if labels.count(group.label) == 1
        else Group(f"{group.runs[0].experiment}: {group.label}" if _apart(groups) else group.run_ids[0], group.runs)
        for group in groups
    ]


def _apart(groups: Sequence[Group]) -> bool:
    return len({(group.runs[0].experiment, group.label) for group in groups}) == len(groups)
