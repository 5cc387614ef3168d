"""The answer: accuracy before and after training, pooled over seeds, and how groups of seeds differ, with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.report.evidence import Group, Scores
from pipelines.report.statistics import Interval, bootstrap_difference, bootstrap_mean, paired_bootstrap

BySteps = Mapping[str, Mapping[int, Scores]]
"""run_id -> step -> scores by problem, on one dataset."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What training did to one group on one dataset."""

    label: str
    dataset: str
    after: Interval
    """Accuracy of the last evaluated checkpoint."""
    before: Interval | None
    """Accuracy of the base model; None where it was not evaluated."""
    gain: Interval | None
    """after - before, paired by problem and seed."""
    against_first: Interval | None
    """after minus that of the first group, paired by problem; None for the first group itself."""
    num_seeds: int
    num_problems: int
    step: int
    """Of the last evaluated checkpoint."""


def outcomes(groups: Sequence[Group], evaluated: Mapping[str, BySteps], *, confidence: float = 0.95) -> list[Outcome]:
    """One outcome per dataset and group with results, in the order given.

    Args:
        groups: the first is the one that the others are held against.
        evaluated: dataset -> run_id -> step -> scores, see `evidence.accuracies`.
    """
    found = []
    for dataset, by_run in evaluated.items():
        baseline: _Table | None = None
        for group in groups:
            table = _table(group, by_run)
            if table is None:
                continue
            found.append(_outcome(group.label, dataset, table, baseline, confidence))
            baseline = baseline or table
    return found


def headline(results: Sequence[Outcome]) -> str:
    """The answer in a sentence or two, about the first dataset."""
    if not results:
        return "Nothing has been evaluated yet."
    held = [outcome for outcome in results if outcome.dataset == results[0].dataset]
    return _headline_of_one(held[0]) if len(held) == 1 else _headline_of_many(held)


def percent(value: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * value:.1f} %"


def points(interval: Interval) -> str:
    """A difference of shares in percentage points, with its interval.

    Example:
        >>> points(Interval(0.152, 0.11, 0.2))
        '+15.2 points [+11.0, +20.0]'
    """
    return f"{100 * interval.value:+.1f} points [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


@dataclass(frozen=True, slots=True)
class _Table:
    """A group's scores on one dataset, [seeds, problems]."""

    problems: tuple[str, ...]
    after: np.ndarray
    before: np.ndarray | None
    step: int


def _table(group: Group, by_run: BySteps) -> _Table | None:
    runs = [by_run[run.run_id] for run in group.runs if by_run.get(run.run_id)]
    if not runs:
        return None
    last = min(max(steps) for steps in runs)
    runs = [steps for steps in runs if last in steps]
    problems = tuple(sorted(set.intersection(*(set(steps[last]) for steps in runs))))
    has_before = last > 0 and all(set(problems) <= set(steps.get(0, ())) for steps in runs)
    return _Table(problems, _stack(runs, last, problems), _stack(runs, 0, problems) if has_before else None, last)


def _stack(runs: Sequence[Mapping[int, Scores]], step: int, problems: Sequence[str]) -> np.ndarray:
    return np.array([[steps[step][problem] for problem in problems] for steps in runs])


def _outcome(label: str, dataset: str, table: _Table, baseline: _Table | None, confidence: float) -> Outcome:
    return Outcome(
        label=label,
        dataset=dataset,
        after=bootstrap_mean(table.after, confidence=confidence),
        before=None if table.before is None else bootstrap_mean(table.before, confidence=confidence),
        gain=None if table.before is None else paired_bootstrap(table.before, table.after, confidence=confidence),
        against_first=None if baseline is None else _against(baseline, table, confidence),
        num_seeds=table.after.shape[0],
        num_problems=len(table.problems),
        step=table.step,
    )


def _against(baseline: _Table, table: _Table, confidence: float) -> Interval | None:
    shared = sorted(set(baseline.problems) & set(table.problems))
    if not shared:
        return None
    sides = [side.after[:, [side.problems.index(problem) for problem in shared]] for side in (baseline, table)]
    return bootstrap_difference(*sides, confidence=confidence)


def _headline_of_one(outcome: Outcome) -> str:
    if outcome.gain is None or outcome.before is None:
        return f"Accuracy on {outcome.dataset} is {percent(outcome.after.value)} after {outcome.step} steps."
    moved = f"{percent(outcome.before.value)} to {percent(outcome.after.value)}, {points(outcome.gain)}"
    if not outcome.gain.excludes(0):
        return f"Accuracy on {outcome.dataset} did not move measurably: {moved}."
    return f"Accuracy on {outcome.dataset} {'rose' if outcome.gain.value > 0 else 'fell'} from {moved}."


def _headline_of_many(results: Sequence[Outcome]) -> str:
    first, best = results[0], max(results, key=lambda outcome: outcome.after.value)
    where = f"On {first.dataset}"
    if best is not first and best.against_first is not None and best.against_first.excludes(0):
        gap = points(best.against_first)
        return f"{where}, {best.label} is best: {percent(best.after.value)}, {gap} against {first.label}."
    different = [result for result in results[1:] if result.against_first and result.against_first.excludes(0)]
    if best is first and different:
        behind = f"{len(different)} of the others fall behind it"
        return f"{where}, {first.label} is best: {percent(first.after.value)}; {behind}."
    return f"{where}, no cell differs measurably from {first.label} ({percent(first.after.value)})."
