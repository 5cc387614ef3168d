"""The answer: accuracy before and after training, pooled over seeds, and how groups of seeds differ, with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipelines.report import evidence
from pipelines.report.evidence import Group, Scores
from pipelines.report.statistics import (
    THESE_WEIGHTS,
    Interval,
    arms_against_first,
    gain_interval,
    mean_interval,
    spread_of,
)
from storage import Store

ONE_SEED = "One seed cannot tell what training does: its interval is about these weights on new problems."
ACCURACY = "accuracy"
BySteps = Mapping[str, Mapping[int, Scores]]
"""run_id -> step -> scores by problem, on one dataset."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What training did to one group on one dataset."""

    label: str
    dataset: str
    measure: str
    """ACCURACY, pass@k or maj@k."""
    after: Interval
    """The measure at the last evaluated checkpoint."""
    before: Interval | None
    """The same of the base model; None where it was not evaluated."""
    gain: Interval | None
    """after - before, paired by problem and seed."""
    against_first: Interval | None
    """after minus that of the first group, paired by problem; None for the first group itself. The intervals of all
    groups hold together."""
    num_seeds: int
    num_problems: int
    step: int
    """Of the last evaluated checkpoint."""
    as_is: bool = False
    """Of models as they are: nothing was trained, and what differs is these weights."""

    @property
    def differs(self) -> bool:
        """Whether it is shown to differ from the first: by training, which one seed cannot show; or of models as they
        are, as weights."""
        if self.against_first is None:
            return False
        return self.against_first.excludes(0) if self.as_is else self.against_first.tells_from(0)


def outcomes(
    groups: Sequence[Group], evaluated: Mapping[str, BySteps], *, measure: str = ACCURACY, confidence: float = 0.95
) -> list[Outcome]:
    """One outcome per dataset and group with results, in the order given.

    Args:
        groups: the first is the one that the others are held against.
        evaluated: dataset -> run_id -> step -> scores, see `evidence.accuracies` and `evidence.other_measures`.
        measure: what the scores are.
        confidence: level of the intervals; those against the first group hold together.
    """
    results: list[Outcome] = []
    as_is = not any(run.trains for group in groups for run in group.runs)
    for dataset, by_run in evaluated.items():
        tables = {group.label: table for group in groups if (table := _table(group, by_run))}
        found = _of_dataset(dataset, measure, tables, confidence) if tables else []
        results += [replace(outcome, as_is=as_is) for outcome in found]
    return results


def outcomes_of_other_measures(
    store: Store, groups: Sequence[Group], accuracy: Sequence[Outcome], *, confidence: float = 0.95
) -> list[Outcome]:
    """pass@k and maj@k of the checkpoints whose accuracy is known: the same intervals, of each problem's score."""
    steps = {0, *(outcome.step for outcome in accuracy)}
    evaluated = evidence.other_measures(store, [run for group in groups for run in group.runs], steps)
    return [
        outcome
        for measure, scores in evaluated.items()
        for outcome in outcomes(groups, scores, measure=measure, confidence=confidence)
    ]


def _of_dataset(dataset: str, measure: str, tables: Mapping[str, "_Table"], confidence: float) -> list[Outcome]:
    """The groups' outcomes, by label. How much seeds differ is pooled over the groups."""
    seeds = spread_of([table.after for table in tables.values()])
    gains = spread_of([table.after - table.before for table in tables.values() if table.before is not None])
    against = [None, *_against_first(list(tables.values()), confidence)]
    return [
        Outcome(
            label=label,
            dataset=dataset,
            measure=measure,
            after=mean_interval(table.after, confidence=confidence, spread=seeds),
            before=None if table.before is None else mean_interval(table.before, confidence=confidence),
            gain=None
            if table.before is None
            else gain_interval(table.before, table.after, confidence=confidence, spread=gains),
            against_first=difference,
            num_seeds=table.after.shape[0],
            num_problems=len(table.problems),
            step=table.step,
        )
        for (label, table), difference in zip(tables.items(), against, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A group's accuracy over the steps at which all its runs were evaluated, on one dataset."""

    label: str
    dataset: str
    by_step: Mapping[int, Interval]


def accuracies_by_step(
    groups: Sequence[Group], evaluated: Mapping[str, BySteps], *, confidence: float = 0.95
) -> list[Accuracy]:
    """One per dataset and group, in the order given; intervals and spread of the seeds as those of `Outcome.after`."""
    results = []
    for dataset, by_run in evaluated.items():
        tables = [_tables_by_step(group, by_run) for group in groups]
        steps = sorted(set().union(*tables))
        spreads = {step: spread_of([table[step] for table in tables if step in table]) for step in steps}
        for group, by_step in zip(groups, tables, strict=True):
            intervals = {
                step: mean_interval(table, confidence=confidence, spread=spreads[step])
                for step, table in by_step.items()
            }
            results.append(Accuracy(group.label, dataset, intervals))
    return results


def _tables_by_step(group: Group, by_run: BySteps) -> dict[int, np.ndarray]:
    """A group's scores [seeds, problems] at each step that all its runs with results have, by step."""
    runs = [by_run[run.run_id] for run in group.runs if by_run.get(run.run_id)]
    steps = sorted(set.intersection(*map(set, runs))) if runs else []
    return {step: _stack(runs, step, _problems(runs, step)) for step in steps}


def left_behind(groups: Sequence[Group], evaluated: Mapping[str, BySteps]) -> list[str]:
    """A sentence for each finished run that was last evaluated at an earlier step than another run of its group."""
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
                        " the answer is of the runs and the last step that are there"
                    )
    return sentences


def headline(results: Sequence[Outcome]) -> str:
    """The answer in a sentence or two, about the first dataset."""
    if not results:
        return "Nothing has been evaluated yet."
    held = [outcome for outcome in results if outcome.dataset == results[0].dataset]
    return _headline_of_one(held[0]) if len(held) == 1 else _headline_of_many(held)


def only_these_weights(results: Sequence[Outcome]) -> bool:
    """Whether all intervals come from one seed each, so that they tell nothing of training, which there was."""
    return all(outcome.after.holds_for == THESE_WEIGHTS and not outcome.as_is for outcome in results)


def percent(value: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * value:.1f} %"


def points(interval: Interval) -> str:
    """A difference of shares in percentage points, with its interval.

    Example:
        >>> points(Interval(0.152, 0.11, 0.2))
        '+15.2 points [+11.0, +20.0]'
    """
    value = f"{100 * interval.value:+.1f} points"
    return f"{value} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]" if interval.known else value


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
    # A run that was evaluated before training alone, be it that what came later is damaged, answers for no training.
    trained = [steps for steps in runs if max(steps) > 0] or runs
    last = min(max(steps) for steps in trained)
    runs = [steps for steps in runs if last in steps]
    problems = _problems(runs, last)
    has_before = last > 0 and all(set(problems) <= set(steps.get(0, ())) for steps in runs)
    return _Table(problems, _stack(runs, last, problems), _stack(runs, 0, problems) if has_before else None, last)


def _problems(runs: Sequence[Mapping[int, Scores]], step: int) -> tuple[str, ...]:
    """Those that every run answered at the step."""
    return tuple(sorted(set.intersection(*(set(steps[step]) for steps in runs))))


def _stack(runs: Sequence[Mapping[int, Scores]], step: int, problems: Sequence[str]) -> np.ndarray:
    return np.array([[steps[step][problem] for problem in problems] for steps in runs])


def _against_first(tables: Sequence[_Table], confidence: float) -> Sequence[Interval | None]:
    """Of every table but the first, on the problems that all of them have."""
    shared = sorted(set.intersection(*(set(table.problems) for table in tables)))
    if len(tables) < 2 or not shared:
        return [None] * (len(tables) - 1)
    arms = [table.after[:, [table.problems.index(problem) for problem in shared]] for table in tables]
    return arms_against_first(arms, confidence=confidence)


def _headline_of_one(outcome: Outcome) -> str:
    sentence = f"Accuracy on {outcome.dataset} {_moved(outcome)}."
    return f"{sentence} {ONE_SEED}" if only_these_weights([outcome]) else sentence


def _moved(outcome: Outcome) -> str:
    if outcome.as_is:
        return f"is {percent(outcome.after.value)}"
    if outcome.gain is None or outcome.before is None:
        return f"is {percent(outcome.after.value)} after {outcome.step} steps"
    moved = f"{percent(outcome.before.value)} to {percent(outcome.after.value)}, {points(outcome.gain)}"
    if not outcome.gain.excludes(0):
        return f"did not move measurably: {moved}"
    return f"{'rose' if outcome.gain.value > 0 else 'fell'} from {moved}"


def _headline_of_many(results: Sequence[Outcome]) -> str:
    first, best = results[0], max(results, key=lambda outcome: outcome.after.value)
    where = f"On {first.dataset}"
    if only_these_weights(results):
        return f"{where}, {best.label} came out highest: {percent(best.after.value)}. {ONE_SEED}"
    if best is not first and best.against_first is not None and best.differs:
        gap = points(best.against_first)
        return f"{where}, {best.label} is best: {percent(best.after.value)}, {gap} against {first.label}."
    different = [result for result in results[1:] if result.differs]
    if best is first and different:
        behind = f"{len(different)} of the others fall behind it"
        return f"{where}, {first.label} is best: {percent(first.after.value)}; {behind}."
    compared = "model" if first.as_is else "cell"
    return f"{where}, no {compared} differs measurably from {first.label} ({percent(first.after.value)})."
