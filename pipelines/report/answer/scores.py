"""Tables of scores, [seeds, problems], at the same step and on the same problems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.report.evidence import Group, Scores
from rpg.statistics.comparison import level

BySteps = Mapping[str, Mapping[int, Scores]]
"""run_id -> step -> scores by problem, on one dataset."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Scale of a measure's values."""

    shares: bool = True
    worst: float | None = 0.0
    """The value of a failed seed; None if unknown."""
    higher_is_better: bool = True


def by_scale(by_run: BySteps, graded: Mapping[str, float | None]) -> list[tuple[Scale, BySteps]]:
    """Returns the runs whose measure is a share, and the runs with graded rewards."""
    shares = {run_id: steps for run_id, steps in by_run.items() if run_id not in graded}
    scores = {run_id: steps for run_id, steps in by_run.items() if run_id in graded}
    worst = [graded[run_id] for run_id in scores]
    known = [value for value in worst if value is not None]
    scale = Scale(False, min(known) if worst and len(known) == len(worst) else None)
    return [(scale, part) for scale, part in ((Scale(), shares), (scale, scores)) if part]


@dataclass(frozen=True, slots=True)
class Level:
    """Confidence level of intervals, and the number of sets that their claims cover."""

    confidence: float
    looks: tuple[float, ...]
    clusters: Mapping[str, str] | None
    scale: Scale
    num_sets: int = 1
    """Number of evaluation sets over which the claims hold jointly (Bonferroni)."""

    @property
    def of_claims(self) -> float:
        """Returns the confidence level of the claims on one set."""
        return 1 - (1 - self.confidence) / self.num_sets

    @property
    def known(self) -> Any:
        """Returns the arguments for every interval. Shares are recognised by their values."""
        return {"confidence": self.confidence, "shares": None if self.scale.shares else False}

    def of(self, problems: Sequence[str]) -> list[str] | None:
        """Returns the cluster of each problem. A problem without a name is its own cluster."""
        known = self.clusters
        return [known.get(problem, problem) for problem in problems] if known else None

    def at(self, num_seeds: int) -> float:
        """Returns the confidence level of gains and differences, given the number of seeds of the largest arm."""
        return level(self.of_claims, len({look for look in self.looks if 1 < look < num_seeds}))


@dataclass(frozen=True, slots=True)
class Table:
    """A group's scores on one dataset, [seeds, problems]."""

    problems: tuple[str, ...]
    after: np.ndarray
    """Scores after training. Failed seeds are rows of NaN at the end."""
    before: np.ndarray | None
    """Scores of the base model, for the seeds that did not fail."""
    step: int
    num_failed: int
    counted: bool
    """Whether the group's runs have ended, so that it can be compared with others."""

    def counted_with(self, worst: float | None) -> np.ndarray:
        """Returns the scores with failed seeds at the worst value, or without them if there is no worst value."""
        lost = np.isnan(self.after)
        return self.after[~lost.any(axis=1)] if worst is None else np.where(lost, worst, self.after)

    def reach(self, worst: float | None) -> float:
        """Returns the distance from the worst value to the best seed; 0 if all seeds failed, or if no worst value is
        known."""
        means = [float(row.mean()) for row in self.after if not np.isnan(row).any()]
        return max((abs(mean - worst) for mean in means), default=0.0) if worst is not None else 0.0


@dataclass(frozen=True, slots=True)
class Tables:
    """Score tables by group, for the groups that have one, and whether they are comparable."""

    of_group: Mapping[str, Table]
    shared: bool
    """Whether all tables have the same step and the same problems."""

    @property
    def most_seeds(self) -> int:
        """Returns the number of seeds of the largest group."""
        return max(len(table.after) for table in self.of_group.values())


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """Results of a group's runs by step. For a trained policy they begin after the start of training."""

    runs: tuple[Mapping[int, Scores], ...]
    before: tuple[Scores, ...]
    """Scores of the base model, for each run in which it was evaluated."""
    num_failed: int
    trains: bool
    counted: bool

    def steps(self) -> set[int]:
        """Returns the steps at which all runs were evaluated."""
        return set.intersection(*map(set, self.runs)) if self.runs else set()

    def table(self, step: int, problems: Sequence[str]) -> Table:
        """Returns the scores at a step."""
        step = step if self.trains else 0
        rows = [[scores[step][problem] for problem in problems] for scores in self.runs]
        rows += [[float("nan")] * len(problems)] * self.num_failed
        paired = bool(self.runs) and len(self.before) == len(self.runs)
        whole = paired and all(set(problems) <= set(scores) for scores in self.before)
        before = np.array([[scores[problem] for problem in problems] for scores in self.before]) if whole else None
        return Table(tuple(problems), np.array(rows), before, step, self.num_failed, self.counted)

    def alone(self) -> Table | None:
        """Returns the scores at the last step that the group's own runs share; None without such a step, or if all runs
        failed."""
        steps = self.steps()
        return self.table(max(steps), _problems(self.runs, max(steps))) if steps else None


def _evaluated(group: Group, by_run: BySteps, *, alone: bool) -> _Evaluated:
    """Returns the scores of the runs that have ended, or all scores so far if no run has ended.

    Args:
        alone: there is no other group. Then the results of failed runs are shown if no run has finished.
    """
    trains = any(run.trains for run in group.runs)
    ended = [run for run in group.runs if run.has_ended]
    failed = sum(run.status == "failed" for run in group.runs) if trains and (ended or not alone) else 0
    counted = bool(ended or failed)
    with_results = [by_run[run.run_id] for run in (ended if counted else group.runs) if by_run.get(run.run_id)]
    # A run with results only from before training (later ones may be damaged) does not count as trained.
    runs = [steps for steps in with_results if max(steps) > 0 or not trains]
    if not runs and not failed:
        runs, trains = with_results, False
    after = tuple({step: scores for step, scores in steps.items() if step > 0 or not trains} for steps in runs)
    before = tuple(steps[0] for steps in runs if 0 in steps) if trains else ()
    return _Evaluated(after, before, failed, trains, counted and any(run.trains for run in group.runs) <= trains)


def score_tables(groups: Sequence[Group], by_run: BySteps, level: Level) -> Tables:
    """Returns tables at the last step that all runs share. Without such a step, each group's table is at its own last
    step."""
    found = {group.label: _evaluated(group, by_run, alone=len(groups) == 1) for group in groups}
    if level.scale.worst is None:  # a group with only failed seeds has no value
        found = {label: each for label, each in found.items() if each.runs}
    counted = [each for each in found.values() if each.counted]
    runs = [each for each in counted if each.runs]
    trained = [each.steps() for each in runs if each.trains]
    step = max(set.intersection(*trained), default=None) if trained else 0
    alone = {label: table for label, each in found.items() if (table := each.alone())}
    if step is None or not runs:
        return Tables(alone, shared=False)
    problems = sorted(set.intersection(*(set(_problems(each.runs, step if each.trains else 0)) for each in runs)))
    if not problems:
        return Tables(alone, shared=False)
    together = {
        label: each.table(step, problems) if each.counted else alone.get(label) for label, each in found.items()
    }
    return Tables({label: table for label, table in together.items() if table}, shared=True)


def tables_by_step(group: Group, by_run: BySteps) -> dict[int, tuple[tuple[str, ...], np.ndarray]]:
    """Returns the problems and, by step, a group's scores [seeds, problems]. Only steps that all its runs with results
    have are included."""
    runs = [by_run[run.run_id] for run in group.runs if by_run.get(run.run_id)]
    steps = sorted(set.intersection(*map(set, runs))) if runs else []
    problems = {step: _problems(runs, step) for step in steps}
    return {step: (problems[step], _stack(runs, step, problems[step])) for step in steps}


def _problems(runs: Sequence[Mapping[int, Scores]], step: int) -> tuple[str, ...]:
    """Returns the problems that every run answered at the step."""
    return tuple(sorted(set.intersection(*(set(steps[step]) for steps in runs))))


def _stack(runs: Sequence[Mapping[int, Scores]], step: int, problems: Sequence[str]) -> np.ndarray:
    return np.array([[steps[step][problem] for problem in problems] for steps in runs])
