"""The answer: accuracy before and after training, pooled over seeds, with intervals, and what may be said of groups.

Compared is what was measured at the same step. A seed whose run failed counts with the worst value that the measure
has; a run that has not ended, or was stopped, is no outcome yet: it is named and not counted. Who is best and what
differs is what `verdict` says, in its words; tables mark the same differences and no others.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipelines.home.home import Home
from pipelines.home.versions import looks_of
from pipelines.report import evidence
from pipelines.report.evidence import Group, Run, Scores
from pipelines.report.statistics import (
    THESE_WEIGHTS,
    Interval,
    Verdict,
    gain_interval,
    mean_interval,
    spread_of,
    verdict,
)
from rpg.statistics.comparison import level
from rpg.statistics.wording import CHOSEN, ONE_SEED
from storage import Store

ACCURACY = "accuracy"
WORST = 0.0
"""Value that a failed seed counts with: all measures are shares."""
_MOST_NAMED = 6
"""Runs that a sentence names one by one."""
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
    """The measure at `step`, failed seeds at WORST."""
    before: Interval | None
    """Accuracy of the base model; None where it was not evaluated."""
    gain: Interval | None
    """after - before, paired by problem and seed; None too where a seed failed, and where several have not ended."""
    against_first: Interval | None
    """after minus that of the first group, as the verdict has it; None for the first group itself, and where the two
    cannot be compared."""
    num_seeds: int
    """Seeds that failed, among `num_seeds`."""
    num_problems: int
    step: int
    """At which it was evaluated: where groups are compared, the last that all have."""
    num_failed: int = 0
    as_is: bool = False
    """Whether models were measured as they are: nothing was trained, and the weights differ."""
    differs: bool = False
    """Whether the verdict tells it from the first group."""
    chosen: bool = False
    """Its model was chosen on these problems, so that the figure flatters it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found on one dataset, and what may be said of it."""

    dataset: str
    measure: str
    outcomes: tuple[Outcome, ...]
    verdict: Verdict | None
    """Verdict on the groups; None where there is one alone, or where they cannot be compared."""
    text: str
    """The headline."""
    clusters: Mapping[str, str] = field(default_factory=dict)
    """Problem -> the cluster it belongs to, of those that share one."""

    @property
    def claims(self) -> bool:
        """Whether groups are told apart."""
        return self.verdict is not None and bool(self.verdict.differences)

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data."""
        differences = self.verdict.differences if self.verdict else ()
        return {
            "dataset": self.dataset,
            "best": self.verdict.best if self.verdict else None,
            "differences": [
                {"better": better, "worse": worse, "value": gap.value, "low": gap.low, "high": gap.high}
                for better, worse, gap in differences
            ],
            "text": self.text,
        }


def answers(
    groups: Sequence[Group],
    evaluated: Mapping[str, BySteps],
    *,
    measure: str = ACCURACY,
    confidence: float = 0.95,
    looks: Sequence[int] = (),
    clusters: Mapping[str, Mapping[str, str]] | None = None,
    chosen: Mapping[str, Collection[str]] | None = None,
) -> list[Answer]:
    """One answer per dataset with results, in the order given.

    Args:
        groups: the first is the one that tables hold the others against.
        evaluated: dataset -> run_id -> step -> scores, see `evidence.accuracies` and `evidence.other_measures`.
        measure: what the scores are.
        confidence: level of the intervals; those of differences hold together.
        looks: numbers of seeds at which the same was asked before.
        clusters: dataset -> problem -> the cluster it belongs to.
        chosen: label of a group -> datasets by which its model was chosen: there it is shown and not compared.
    """
    found = []
    for dataset, by_run in evaluated.items():
        tables = _tables(groups, by_run)
        if tables.of_group:
            level = _Level(confidence, tuple(looks), (clusters or {}).get(dataset))
            flattered = {label for label, names in (chosen or {}).items() if dataset in names}
            answer = _answer(dataset, measure, groups, tables, level, flattered)
            found.append(replace(answer, clusters=level.clusters or {}))
    return found


def answers_of(
    home: Home,
    store: Store,
    groups: Sequence[Group],
    names: Sequence[str],
    evaluated: Mapping[str, BySteps] | None = None,
) -> list[Answer]:
    """What may be said of accuracy, at the level that the runs' spec asks for.

    Args:
        names: of the experiments that are asked about, whose earlier answers count; none for runs by themselves.
        evaluated: what `evidence.accuracies` has, where that is read already.
    """
    runs = [run for group in groups for run in group.runs]
    if evaluated is None:
        evaluated = evidence.accuracies(store, [run.run_id for run in runs])
    looks = sorted({look for name in names for look in looks_of(home, name)})
    clusters = evidence.clusters(store, [run.run_id for run in runs])
    return answers(
        groups,
        evaluated,
        confidence=confidence_of(groups),
        looks=looks,
        clusters=clusters,
        chosen=evidence.chosen_by(store, groups),
    )


def confidence_of(groups: Sequence[Group]) -> float:
    """The level of the intervals, as the first run's spec has it."""
    return float(groups[0].runs[0].spec.get("evaluation", {}).get("confidence", 0.95))


def num_seeds(groups: Sequence[Group]) -> int:
    """Finished and failed runs of the cell that has most."""
    return max(sum(run.trains and (has_ended(run) or run.status == "failed") for run in group.runs) for group in groups)


def outcomes_of(found: Sequence[Answer]) -> list[Outcome]:
    """Outcomes on all datasets."""
    return [outcome for answer in found for outcome in answer.outcomes]


def clusters_of(found: Sequence[Answer]) -> dict[str, Mapping[str, str]]:
    """Dataset -> problem -> the cluster it belongs to."""
    return {answer.dataset: answer.clusters for answer in found}


def answers_of_other_measures(
    store: Store,
    groups: Sequence[Group],
    found: Sequence[Answer],
    *,
    confidence: float = 0.95,
) -> list[Answer]:
    """pass@k and maj@k of the checkpoints whose accuracy is known: the same intervals, of each problem's score."""
    steps = {0, *(outcome.step for outcome in outcomes_of(found))}
    runs = [run for group in groups for run in group.runs]
    evaluated = evidence.other_measures(store, runs, steps)
    chosen: dict[str, set[str]] = {}
    for outcome in outcomes_of(found):
        if outcome.chosen:
            chosen.setdefault(outcome.label, set()).add(outcome.dataset)
    return [
        answer
        for measure, scores in evaluated.items()
        for answer in answers(
            groups, scores, measure=measure, confidence=confidence, clusters=clusters_of(found), chosen=chosen
        )
    ]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A group's accuracy over the steps at which all its runs were evaluated, on one dataset."""

    label: str
    dataset: str
    by_step: Mapping[int, Interval]


def accuracies_by_step(
    groups: Sequence[Group],
    evaluated: Mapping[str, BySteps],
    *,
    confidence: float = 0.95,
    clusters: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Accuracy]:
    """One per dataset and group, in the order given; intervals and spread of the seeds as those of `Outcome.after`."""
    results = []
    for dataset, by_run in evaluated.items():
        level = _Level(confidence, (), (clusters or {}).get(dataset))
        tables = [_tables_by_step(group, by_run) for group in groups]
        steps = sorted(set().union(*tables))
        spreads = {step: spread_of([by_step[step][1] for by_step in tables if step in by_step]) for step in steps}
        for group, by_step in zip(groups, tables, strict=True):
            intervals = {
                step: mean_interval(table, confidence=confidence, spread=spreads[step], clusters=level.of(problems))
                for step, (problems, table) in by_step.items()
            }
            results.append(Accuracy(group.label, dataset, intervals))
    return results


def _tables_by_step(group: Group, by_run: BySteps) -> dict[int, tuple[tuple[str, ...], np.ndarray]]:
    """Problems and a group's scores [seeds, problems] at each step that all its runs with results have, by step."""
    runs = [by_run[run.run_id] for run in group.runs if by_run.get(run.run_id)]
    steps = sorted(set.intersection(*map(set, runs))) if runs else []
    problems = {step: _problems(runs, step) for step in steps}
    return {step: (problems[step], _stack(runs, step, problems[step])) for step in steps}


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


def headline(found: Sequence[Answer]) -> str:
    """The answer in a few sentences, about the first dataset."""
    return found[0].text if found else "Nothing has been evaluated yet."


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
class _Level:
    """How sure the intervals are to be."""

    confidence: float
    looks: tuple[int, ...]
    clusters: Mapping[str, str] | None

    def of(self, problems: Sequence[str]) -> list[str] | None:
        """The cluster of each problem; one without a name is a cluster of its own."""
        known = self.clusters
        return [known.get(problem, problem) for problem in problems] if known else None

    def at(self, num_seeds: int) -> float:
        """The level of an interval from so many seeds."""
        return level(self.confidence, len({look for look in self.looks if 1 < look < num_seeds}))


@dataclass(frozen=True, slots=True)
class _Table:
    """A group's scores on one dataset, [seeds, problems]."""

    problems: tuple[str, ...]
    after: np.ndarray
    """Rows of NaN for failed seeds come last."""
    before: np.ndarray | None
    """Scores of the base model, of the seeds that did not fail."""
    step: int
    num_failed: int
    counted: bool
    """Its runs have ended, so that it can be held against others."""

    @property
    def at_worst(self) -> np.ndarray:
        """Scores with failed seeds at WORST."""
        return np.where(np.isnan(self.after), WORST, self.after)


@dataclass(frozen=True, slots=True)
class _Tables:
    """Score tables of the groups that have one, by label, and whether they can be held against each other."""

    of_group: Mapping[str, _Table]
    shared: bool
    """They are all of one step and of the same problems."""


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """A group's runs with results, by step; of a policy that was trained those after training began."""

    runs: tuple[Mapping[int, Scores], ...]
    before: tuple[Scores, ...]
    """The base model's, one a run where it was evaluated."""
    num_failed: int
    trains: bool
    counted: bool

    def steps(self) -> set[int]:
        """At which all of them were evaluated."""
        return set.intersection(*map(set, self.runs)) if self.runs else set()

    def table(self, step: int, problems: Sequence[str]) -> _Table:
        """The scores at a step."""
        step = step if self.trains else 0
        rows = [[scores[step][problem] for problem in problems] for scores in self.runs]
        rows += [[float("nan")] * len(problems)] * self.num_failed
        paired = bool(self.runs) and len(self.before) == len(self.runs)
        whole = paired and all(set(problems) <= set(scores) for scores in self.before)
        before = np.array([[scores[problem] for problem in problems] for scores in self.before]) if whole else None
        return _Table(tuple(problems), np.array(rows), before, step, self.num_failed, self.counted)

    def alone(self) -> _Table | None:
        """The scores at the last step that its own runs share; None where there is none, and where all failed."""
        steps = self.steps()
        return self.table(max(steps), _problems(self.runs, max(steps))) if steps else None


def _evaluated(group: Group, by_run: BySteps, *, alone: bool) -> _Evaluated:
    """Scores of the runs that have ended; where none has, scores so far.

    Args:
        alone: there is no other group. Then what there is of failed runs is told where no run has finished.
    """
    trains = any(run.trains for run in group.runs)
    ended = [run for run in group.runs if has_ended(run)]
    failed = sum(run.status == "failed" for run in group.runs) if trains and (ended or not alone) else 0
    counted = bool(ended or failed)
    with_results = [by_run[run.run_id] for run in (ended if counted else group.runs) if by_run.get(run.run_id)]
    # A run that was evaluated before training alone, be it that what came later is damaged, answers for no training.
    runs = [steps for steps in with_results if max(steps) > 0 or not trains]
    if not runs and not failed:
        runs, trains = with_results, False
    after = tuple({step: scores for step, scores in steps.items() if step > 0 or not trains} for steps in runs)
    before = tuple(steps[0] for steps in runs if 0 in steps) if trains else ()
    return _Evaluated(after, before, failed, trains, counted and any(run.trains for run in group.runs) <= trains)


def has_ended(run: Run) -> bool:
    """Whether a run is an outcome: it has finished, or writes its report, which is its last stage."""
    evaluation = run.stages.get("evaluate", {}).get("status")
    return run.status == "finished" or (run.status == "running" and evaluation == "finished")


def _tables(groups: Sequence[Group], by_run: BySteps) -> _Tables:
    """At the last step that all runs share; where there is no such step, each group's at its own."""
    found = {group.label: _evaluated(group, by_run, alone=len(groups) == 1) for group in groups}
    counted = [each for each in found.values() if each.counted]
    runs = [each for each in counted if each.runs]
    trained = [each.steps() for each in runs if each.trains]
    step = max(set.intersection(*trained), default=None) if trained else 0
    alone = {label: table for label, each in found.items() if (table := each.alone())}
    if step is None or not runs:
        return _Tables(alone, shared=False)
    problems = sorted(set.intersection(*(set(_problems(each.runs, step if each.trains else 0)) for each in runs)))
    if not problems:
        return _Tables(alone, shared=False)
    together = {
        label: each.table(step, problems) if each.counted else alone.get(label) for label, each in found.items()
    }
    return _Tables({label: table for label, table in together.items() if table}, shared=True)


def _problems(runs: Sequence[Mapping[int, Scores]], step: int) -> tuple[str, ...]:
    """Problems that every run answered at the step."""
    return tuple(sorted(set.intersection(*(set(steps[step]) for steps in runs))))


def _stack(runs: Sequence[Mapping[int, Scores]], step: int, problems: Sequence[str]) -> np.ndarray:
    return np.array([[steps[step][problem] for problem in problems] for steps in runs])


def _answer(
    dataset: str, measure: str, groups: Sequence[Group], tables: _Tables, level: _Level, flattered: Collection[str]
) -> Answer:
    as_is = not any(run.trains for group in groups for run in group.runs)
    results = [
        replace(outcome, as_is=as_is, chosen=outcome.label in flattered)
        for outcome in _outcomes(dataset, measure, tables.of_group, level)
    ]
    if len(results) == 1:
        return Answer(dataset, measure, tuple(results), None, _headline_of_one(results[0], groups))
    known = tables.of_group.items() if tables.shared else ()
    held = {label: table for label, table in known if table.counted and label not in flattered}
    if len(held) < 2:
        return Answer(dataset, measure, tuple(results), None, _nothing_compared(dataset, results, groups))
    problems = next(iter(held.values())).problems
    arms, clusters = {label: table.after for label, table in held.items()}, level.of(problems)
    said = verdict(arms, level.looks, level.confidence, clusters, WORST, trained=not as_is)
    first, against = groups[0].label, said
    if not as_is and all(len(table.after) == 1 and not table.num_failed for table in held.values()):
        against = verdict(arms, confidence=level.confidence, clusters=clusters, trained=False)
    if first in held:
        results = [_against(outcome, first, said, against) if outcome.label in held else outcome for outcome in results]
    step = next((table.step for table in held.values() if table.step), 0)
    where = f"On {dataset} at step {step}: " if step else f"On {dataset}: "
    text = " ".join([where + said.text, *_not_compared(results), *_not_whole(groups)])
    return Answer(dataset, measure, tuple(results), said, text)


def _against(outcome: Outcome, first: str, said: Verdict, intervals: Verdict) -> Outcome:
    """The outcome with its difference from the first group. `intervals`: has those of differences, also where nothing
    is said."""
    if outcome.label == first:
        return outcome
    interval = intervals.over(outcome.label, first)
    return replace(outcome, against_first=interval, differs=said.tells(outcome.label, first))


def _outcomes(dataset: str, measure: str, tables: Mapping[str, _Table], level: _Level) -> list[Outcome]:
    """The groups' outcomes, by label. How much seeds differ is pooled over the groups of which none failed."""
    whole = [table for table in tables.values() if not table.num_failed]
    seeds = spread_of([table.after for table in whole])
    gains = spread_of([table.after - table.before for table in whole if table.before is not None])
    results = []
    for label, table in tables.items():
        count, lost, clusters = len(table.after), table.num_failed, level.of(table.problems)
        after = mean_interval(
            table.at_worst, confidence=level.confidence, spread=None if lost else seeds, clusters=clusters
        )
        before = table.before
        results.append(
            Outcome(
                label=label,
                dataset=dataset,
                measure=measure,
                after=after,
                before=None
                if before is None
                else mean_interval(before, confidence=level.confidence, clusters=clusters),
                gain=None
                if before is None or lost or not (table.counted or count == 1)
                else gain_interval(before, table.after, confidence=level.at(count), spread=gains, clusters=clusters),
                against_first=None,
                num_seeds=count,
                num_problems=len(table.problems),
                step=table.step,
                num_failed=lost,
            )
        )
    return results


def _headline_of_one(outcome: Outcome, groups: Sequence[Group]) -> str:
    said = [f"Accuracy on {outcome.dataset} {_moved(outcome)}."]
    if only_these_weights([outcome]):
        said.append(ONE_SEED)
    if outcome.num_failed:
        said.append(
            f"{outcome.num_failed} of {outcome.num_seeds} seeds failed, counted as {percent(WORST)}:"
            " no gain is claimed."
        )
    return " ".join([*said, *_not_whole(groups)])


def _moved(outcome: Outcome) -> str:
    if outcome.as_is:
        return f"is {percent(outcome.after.value)}"
    if outcome.gain is None or outcome.before is None:
        return f"is {percent(outcome.after.value)} after {outcome.step} steps"
    moved = f"{percent(outcome.before.value)} to {percent(outcome.after.value)}, {points(outcome.gain)}"
    if not outcome.gain.excludes(0):
        return f"did not move measurably: {moved}"
    return f"{'rose' if outcome.gain.value > 0 else 'fell'} from {moved}"


def _nothing_compared(dataset: str, results: Sequence[Outcome], groups: Sequence[Group]) -> str:
    at = dict.fromkeys(f"{result.label} at step {result.step}" for result in results)
    if any(result.chosen for result in results):
        return " ".join([f"On {dataset} nothing is compared.", *_not_compared(results), *_not_whole(groups)])
    why = f"they share no step at which all were evaluated ({_listed(list(at))})"
    if len({result.step for result in results}) == 1:
        why = "fewer than two have ended, or they share no problem"
    return " ".join([f"On {dataset} nothing is compared: {why}.", *_not_compared(results), *_not_whole(groups)])


def _not_compared(results: Sequence[Outcome]) -> list[str]:
    return [f"{result.label} is not compared ({CHOSEN})." for result in results if result.chosen]


def _not_whole(groups: Sequence[Group]) -> list[str]:
    """Which seeds failed, and which runs are no outcomes yet."""
    runs = [(group, run) for group in groups for run in group.runs if run.trains]
    failed = [_named(groups, group, run) for group, run in runs if run.status == "failed"]
    # Where nothing has ended, what there is so far is all that is told of.
    ended = any(has_ended(run) or run.status == "failed" for _, run in runs)
    open_ = [
        f"{_named(groups, group, run)} ({run.status})"
        for group, run in runs
        if run.status != "failed" and not has_ended(run) and ended
    ]
    said = [f"Failed: {_listed(failed)}."] if failed else []
    return [*said, f"Not counted, as they have not ended: {_listed(open_)}."] if open_ else said


def _named(groups: Sequence[Group], group: Group, run: Run) -> str:
    return f"seed {run.seed}" if len(groups) == 1 else f"seed {run.seed} of {group.label}"


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])
