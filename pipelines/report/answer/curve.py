"""Accuracy over training: the accuracy of each group at each step at which all its runs were evaluated, and the runs
that are behind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.report import evidence
from pipelines.report.answer.outcome import ACCURACY, SCORE
from pipelines.report.answer.scores import BySteps, Level, by_scale, tables_by_step
from pipelines.report.evidence import Group
from pipelines.report.statistics import Interval, mean_interval, spread_of


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A group's accuracy, or score, over the steps at which all its runs were evaluated, on one dataset."""

    label: str
    dataset: str
    measure: str
    """ACCURACY or SCORE."""
    by_step: Mapping[int, Interval]


def accuracies_by_step(
    groups: Sequence[Group],
    evaluated: Mapping[str, BySteps],
    *,
    confidence: float = 0.95,
    clusters: Mapping[str, Mapping[str, str]] | None = None,
    graded: evidence.Graded | None = None,
) -> list[Accuracy]:
    """Returns one curve for each dataset and group, in the given order, with intervals and spread of the seeds like
    `Outcome.after`."""
    results = []
    parts = (
        (dataset, scale, by_run)
        for dataset, of_dataset in evaluated.items()
        for scale, by_run in by_scale(of_dataset, (graded or {}).get(dataset, {}))
    )
    for dataset, scale, by_run in parts:
        level = Level(confidence, (), (clusters or {}).get(dataset), scale)
        tables = [tables_by_step(group, by_run) for group in groups]
        steps = sorted(set().union(*tables))
        spreads = {step: spread_of([by_step[step][1] for by_step in tables if step in by_step]) for step in steps}
        for group, by_step in zip(groups, tables, strict=True):
            intervals = {
                step: mean_interval(table, spread=spreads[step], clusters=level.of(problems), **level.known)
                for step, (problems, table) in by_step.items()
            }
            results.append(Accuracy(group.label, dataset, ACCURACY if scale.shares else SCORE, intervals))
    return results


def left_behind(groups: Sequence[Group], evaluated: Mapping[str, BySteps]) -> list[str]:
    """Returns a sentence for each finished run whose last evaluation is at an earlier step than that of another run of
    its group."""
    sentences = []
    for dataset, by_run in evaluated.items():
        for group in groups:
            last = {run.run_id: max(by_run.get(run.run_id, {}), default=None) for run in group.runs}
            latest = max((step for step in last.values() if step is not None), default=None)
            for run in group.runs:
                step = last[run.run_id]
                if run.status == "finished" and step != latest:
                    found = "has no evaluation" if step is None else f"was last evaluated at step {step}"
                    sentences.append(
                        f"{run.name or run.run_id} {found} on {dataset}, others at step {latest}:"
                        " the answer covers the available runs, at their last common step"
                    )
    return sentences
