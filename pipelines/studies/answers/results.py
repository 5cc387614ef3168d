"""Reading of a study's record, study.json: the trials, their confirmation, and the best trial."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipelines.home.home import Home
from pipelines.report.charts import number
from pipelines.report.statistics import Interval
from specs.documents.reading import read_checked
from specs.errors import Issue, SpecError
from specs.metrics import BY_NAME, is_share
from specs.schema.study import measure_label

Params = dict[str, Any]
"""Path -> value, or the case's name for `cases`. A parameter whose `when` does not hold is left out."""
SHARES = ("mean@", "pass@", "maj@")
"""Measures that are shares between 0 and 1, shown in percentage points."""
COSTS = ("tokens", "gpu_hours", "seconds")
"""Recorded costs of a trial and of the whole study."""
_ENDED = ("finished", "pruned", "failed")


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal by which trials are judged."""

    dataset: str
    """Evaluation set; empty for a training metric."""
    metric: str
    direction: Literal["maximize", "minimize"]
    least: float | None = None
    """Least possible value of score@k that the reward declares; None if it declares none."""

    @property
    def measure(self) -> str:
        """Name of the measure in a sentence: `mean@4 on held_out`, `kl/reverse`."""
        return measure_label(self.metric, self.dataset)

    @property
    def is_share(self) -> bool:
        """Whether the goal's values are shares between 0 and 1."""
        return self.metric.startswith(SHARES) or is_share(self.metric)

    @property
    def worst(self) -> float | None:
        """Value of a failed seed; None if there is no worst value, for example for a training metric."""
        if self.direction == "minimize":
            return 1.0 if self.is_share else None
        return 0.0 if self.is_share else self.least

    def possible(self, value: float) -> float:
        """Returns the value, clipped to the goal's possible values."""
        if self.is_share:
            return min(max(value, 0.0), 1.0)
        if (known := BY_NAME.get(self.metric)) and not self.dataset:
            return min(max(value, known.least), known.most)
        return value if self.least is None else max(value, self.least)

    def better(self, value: float) -> float:
        """Returns the value with a sign such that larger is better."""
        return value if self.direction == "maximize" else -value

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Goal":
        """Returns the goal that a record's entry describes."""
        return cls(data.get("dataset") or "", data["metric"], data["direction"], data.get("least"))


@dataclass(frozen=True, slots=True)
class Trial:
    """One point of the search space and its results."""

    number: int
    state: str
    """finished, pruned, paused, running, pending, failed or cancelled."""
    params: Params
    baseline: bool
    """Whether the trial has the experiment's own values."""
    run_ids: tuple[str, ...]
    """One run id for each seed."""
    values: tuple[float, ...]
    """One value for each goal; empty if the trial has not finished."""
    interval: Interval | None
    """Interval of the first goal's value."""
    posterior_mean: float | None
    """Mean of the first goal's value by the sampler's model, which does not know the goal's bounds; None without a
    model."""
    expected: Interval | None
    """`posterior_mean` with its central 95 % interval, clipped to the goal's possible values."""
    chance: float
    """Probability, by the sampler's model, that this is the study's best trial; NaN without a model."""
    gain: float | None
    """How much the trial was expected to improve the best posterior mean when it was proposed; None if no model chose
    it."""
    rung: int | None
    """The last rung (a step) that the trial reached; None if it reached none."""
    rungs: dict[int, Interval]
    """Step of each rung -> the first goal's value there."""
    constraints: dict[str, float]
    """Measured value of each constrained metric: `kl/reverse`, `mean@4 on held_out`."""
    feasible: bool
    """Whether the trial satisfies the constraints."""
    reason: str
    """The reason why the trial was pruned, failed or cancelled."""
    tokens: float
    """Response tokens sampled for training, over its seeds."""
    gpu_hours: float
    seconds: float
    attempts: int
    """Number of restarts after failures that its values did not cause."""

    @property
    def finished(self) -> bool:
        """Whether the trial was trained to its end and has a value."""
        return self.state == "finished" and bool(self.values)

    @property
    def value(self) -> float:
        """Value of the first goal; NaN if the trial has not finished."""
        return self.values[0] if self.values else math.nan

    @property
    def last(self) -> Interval | None:
        """Returns the first goal's value at the trial's end, or at the last rung that it reached."""
        return self.interval or (self.rungs[max(self.rungs)] if self.rungs else None)

    @classmethod
    def of(cls, data: Mapping[str, Any], goal: Goal) -> "Trial":
        """Returns the trial that a record's entry describes. `goal`: the study's first goal."""
        value = data.get("value")
        return cls(
            number=data["number"],
            state=data["state"],
            params=dict(data.get("params") or {}),
            baseline=bool(data.get("baseline")),
            run_ids=tuple(data.get("run_ids") or ()),
            values=tuple(data["values"] or ()),
            interval=None if value is None else _interval(value, data.get("value_low"), data.get("value_high")),
            posterior_mean=data.get("posterior_mean"),
            expected=_expected(data, goal),
            chance=math.nan if data.get("chance_of_best") is None else float(data["chance_of_best"]),
            gain=data.get("expected_gain"),
            rung=data.get("rung"),
            rungs=dict(sorted((int(step), _rung(rung)) for step, rung in (data.get("rungs") or {}).items())),
            constraints={name: at for name, at in (data.get("constraints") or {}).items() if at is not None},
            feasible=data.get("feasible") is not False,
            reason=data.get("reason") or "",
            tokens=float(data.get("tokens") or 0),
            gpu_hours=float(data.get("gpu_hours") or 0),
            seconds=float(data.get("seconds") or 0),
            attempts=int(data.get("attempts") or 0),
        )


def last_value(param: Any) -> Any:
    """Returns a param as a number that a chart can place. A schedule is represented by its last value."""
    return param["schedule"][-1][1] if isinstance(param, dict) and "schedule" in param else param


@dataclass(frozen=True, slots=True)
class Unit:
    """One run of the confirmation: an arm with a fresh seed."""

    seed: int
    run_id: str
    state: str
    value: float | None
    """The value; None unless it has finished."""
    reason: str
    constraints: Mapping[str, float]
    """Measured value of each constrained metric."""


@dataclass(frozen=True, slots=True)
class Arm:
    """The baseline or a candidate, run again on the fresh seeds."""

    trial: int
    """The trial's number in the search."""
    params: Params
    baseline: bool
    units: tuple[Unit, ...] = ()
    """Its runs that have begun."""
    stopped_after: int = 0
    """Number of seeds after which the arm stopped early, because it could no longer win; 0 if it did not."""

    @property
    def label(self) -> str:
        """`baseline` or `trial 7`."""
        return "baseline" if self.baseline else f"trial {self.trial}"

    @property
    def finished(self) -> tuple[Unit, ...]:
        """Returns the runs that have a value."""
        return tuple(unit for unit in self.units if unit.value is not None)

    @property
    def failed(self) -> tuple[Unit, ...]:
        """Returns the runs that have ended without a value."""
        return tuple(unit for unit in self.units if unit.value is None and unit.state in _ENDED)

    def mean(self, worst: float | None) -> float:
        """Returns the mean over the fresh seeds. NaN without seeds, or if a seed failed and the goal has no worst value
        to count it with.

        Args:
            worst: the value of a failed seed; None if it has none.
        """
        values = [unit.value for unit in self.units if unit.value is not None]
        if self.failed and worst is None:
            return math.nan
        values += [worst for _ in self.failed if worst is not None]
        return statistics.fmean(values) if values else math.nan


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The best candidates and the baseline on seeds that no trial had."""

    dataset: str
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    looks: tuple[int, ...]
    """Numbers of fresh seeds of the interim analyses that compared the arms."""
    most: int
    """Largest number of seeds of each arm."""
    share: int
    """Share of the error of the last interim analysis; see `rpg.statistics.comparison.level`."""
    decided: bool
    """Whether no further round follows."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """Returns the runs of all arms."""
        return tuple(unit for arm in self.arms for unit in arm.units)

    @property
    def over(self) -> bool:
        """Whether every run has ended, and no round follows."""
        return self.decided and bool(self.units) and all(unit.state in _ENDED for unit in self.units)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Confirmation":
        """Returns the confirmation that a record's entry describes."""
        arms = tuple(
            Arm(
                arm["trial"],
                dict(arm.get("params") or {}),
                bool(arm.get("baseline")),
                _units(arm),
                int(arm.get("stopped_after") or 0),
            )
            for arm in data.get("arms") or ()
        )
        seeds, looks = tuple(data.get("seeds") or ()), tuple(data.get("looks") or ())
        return cls(
            data.get("dataset") or "",
            seeds,
            arms,
            looks,
            int(data["most"]),
            int(data["share"]),
            bool(data["decided"]),
        )


@dataclass(frozen=True, slots=True)
class Best:
    """The best trial of the study, and what this judgement is based on."""

    trial: int | None
    """The trial's number. None means the experiment's own values if no trial has them."""
    params: Params
    value: float
    """Value of the first goal: on fresh seeds if confirmed, else the trial's own."""
    baseline: bool
    standing: Literal["confirmed", "candidate"]
    """confirmed: best of the arms on fresh seeds. candidate: best of the search, which is biased upward."""


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """The whole record of a study."""

    name: str
    question: str
    experiment: str
    """The experiment's file."""
    goal: str
    """The goals as text."""
    goals: tuple[Goal, ...]
    constraints: tuple[Mapping[str, Any], ...]
    """Constraints of the spec: metric, dataset, max, min."""
    sampler: str
    pruner: Mapping[str, Any]
    """The pruner's type and parameters; `none` without a pruner."""
    trials_wanted: int
    seeds: tuple[int, ...]
    confidence: float
    status: str
    """searching, confirming, finished, or stopped (by a failure, see on_failure)."""
    parameters: Mapping[str, Mapping[str, Any]]
    """The searched ranges: path -> {float | int | choice | cases, log, step, when}."""
    overrides: Params
    outside: Params
    """The experiment's own values that are outside the ranges. The baseline's params lack them."""
    spent: Mapping[str, float]
    """tokens, gpu_hours and seconds of all trials."""
    trials: tuple[Trial, ...]
    confirmation: Confirmation | None

    @property
    def first(self) -> Goal:
        """Returns the goal, or the first of several."""
        return self.goals[0]

    @property
    def finished(self) -> tuple[Trial, ...]:
        """Returns the trials that have a value, in order."""
        return tuple(trial for trial in self.trials if trial.finished)

    @property
    def baseline(self) -> Trial | None:
        """Returns the finished trial with the experiment's own values."""
        return next((trial for trial in self.finished if trial.baseline), None)

    @property
    def measured(self) -> tuple[Arm, ...]:
        """Returns the comparable arms of the confirmation, the baseline first.

        A failed seed counts if the goal has a worst value: then two seeds that have ended are enough, otherwise two
        must have finished. Empty while runs remain, and if the baseline or every candidate is missing.
        """
        if self.confirmation is None or not self.confirmation.over:
            return ()
        counts = self.first.worst is not None and any(arm.finished for arm in self.confirmation.arms)
        arms = [arm for arm in self.confirmation.arms if len(arm.finished) + counts * len(arm.failed) > 1]
        baselines = [arm for arm in arms if arm.baseline]
        candidates = [arm for arm in arms if not arm.baseline]
        return (*baselines, *candidates) if baselines and candidates else ()

    def broken(self, arm: Arm) -> list[str]:
        """Returns the constraints that an arm's mean over its fresh seeds breaks: `kl/reverse at most 0.05: 0.3`."""
        found = []
        for bound in self.constraints:
            metric = measure_label(bound["metric"], bound.get("dataset") or "")
            values = [unit.constraints[metric] for unit in arm.finished if metric in unit.constraints]
            mean = statistics.fmean(values) if values else math.nan
            low, high = bound.get("min"), bound.get("max")
            if low is not None and mean < low:
                found.append(f"{metric} at least {low:g}: {mean:.3g}")
            if high is not None and mean > high:
                found.append(f"{metric} at most {high:g}: {mean:.3g}")
        return found

    @property
    def has_model(self) -> bool:
        """Whether the sampler's model has an expectation for a finished trial."""
        return any(trial.expected for trial in self.finished)

    @property
    def num_ended(self) -> int:
        """Number of trials that have ended for good."""
        return sum(trial.state in _ENDED for trial in self.trials)

    def count(self, state: str) -> int:
        """Returns the number of trials in a state."""
        return sum(trial.state == state for trial in self.trials)

    def params_of(self, each: Trial | Arm) -> Params:
        """Returns the params to show, in the order of the ranges. The baseline also has those outside the ranges."""
        params = {**each.params, **self.outside} if each.baseline else each.params
        return {path: params[path] for path in (*self.parameters, *params) if path in params}

    def settings(self, params: Params) -> Params:
        """Returns the experiment's settings that the params stand for: path -> value."""
        cases = {path: self.parameters.get(path, {}).get("cases") for path in params}
        return {path: named[value] if (named := cases[path]) else value for path, value in params.items()}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "StudyRecord":
        """Returns the record in study.json."""
        goals = tuple(map(Goal.of, data["goals"]))
        trials = tuple(Trial.of(trial, goals[0]) for trial in data.get("trials") or ())
        spent, confirmation = data.get("spent") or {}, data.get("confirmation")
        return cls(
            name=data["name"],
            question=data.get("question") or "",
            experiment=data["experiment"],
            goal=data["goal"],
            goals=goals,
            constraints=tuple(data.get("constraints") or ()),
            sampler=data.get("sampler") or "",
            pruner=data.get("pruner") or {"type": "none"},
            trials_wanted=int(data.get("trials_wanted") or 0),
            seeds=tuple(data.get("seeds") or ()),
            confidence=data.get("confidence") or 0.95,
            status=data.get("status") or "",
            parameters=data.get("parameters") or {},
            overrides=dict(data.get("overrides") or {}),
            outside=dict(data.get("outside") or {}),
            spent={name: float(spent.get(name) or 0) for name in COSTS},
            trials=trials,
            confirmation=Confirmation.of(confirmation) if confirmation else None,
        )


def read_study(home: Home, name: str) -> StudyRecord:
    """Returns a study's record. Raises SpecError if there is no such study."""
    data, problems = read_checked(home.study(name) / "study.json")
    if not data and not problems:
        raise SpecError(Issue("no such study", given=name, hint="`rpg study list` lists them"))
    try:
        return StudyRecord.of(data)
    except (AttributeError, KeyError, TypeError, ValueError):
        message = f"studies/{name}/study.json is not a study's record: {'; '.join(problems[:3]) or 'it lacks keys'}"
        hint = "restore it from a backup, or call `rpg study run` with the study's file, which writes it again"
        raise SpecError(Issue(message, given=name, hint=hint)) from None


def best_of(record: StudyRecord, better: Sequence[Arm] = ()) -> Best | None:
    """Returns the best trial of the study; None if nothing has finished, or with several goals before confirmation.

    An arm that was confirmed on fresh seeds comes before any trial of the search, and the baseline before a candidate
    that is no better. One that stopped before the others is not compared with their means, which are over more seeds. A
    trial that breaks a constraint is never best, even if it breaks it only on fresh seeds.

    Args:
        better: the arms that are better than the baseline on fresh seeds; if there are any, the best is one of them.
    """
    if record.measured:
        arms = better or record.measured
        means = [(arm, arm.mean(record.first.worst)) for arm in arms if not record.broken(arm)]
        known = [(arm, mean) for arm, mean in means if not math.isnan(mean)]
        if not known:
            return None
        most = max(len(arm.units) for arm, _ in known)
        whole = [row for row in known if len(row[0].units) == most]
        arm, mean = max(whole, key=lambda row: record.first.better(row[1]))
        return Best(arm.trial, arm.params, mean, arm.baseline, "confirmed")
    if len(record.goals) > 1 or (trial := best_trial(record)) is None:
        return None
    return Best(trial.number, trial.params, trial.value, trial.baseline, "candidate")


def best_trial(record: StudyRecord) -> Trial | None:
    """Returns the finished trial that satisfies the constraints and is best by the first goal: by posterior mean if the
    sampler has a model, else by its own value. The first wins a tie."""
    eligible = _eligible(record)
    # The model's space does not contain a baseline outside the ranges.
    rated = [trial for trial in eligible if trial.expected is not None or trial.baseline]

    def merit(trial: Trial) -> float:
        return record.first.better(trial.value if trial.posterior_mean is None else trial.posterior_mean)

    has_model = any(trial.expected for trial in rated)
    return max(rated if has_model else eligible, key=lambda trial: (merit(trial), -trial.number), default=None)


def pareto_front(record: StudyRecord) -> list[Trial]:
    """Returns the trials that no other trial dominates, ordered by the first goal, best first; see `undominated`."""
    trials = {trial.number: trial for trial in _eligible(record)}
    return [trials[number] for number in undominated({number: _merits(record, at) for number, at in trials.items()})]


def undominated(merits: Mapping[int, tuple[float, ...]]) -> list[int]:
    """Returns the trials that no other trial dominates (at least as good in every goal and better in one), by merit,
    then by number.

    Args:
        merits: trial's number -> its merit at each goal; larger is better.
    """
    front: list[int] = []
    for trial in sorted(merits, key=lambda trial: (*(-merit for merit in merits[trial]), trial)):
        # In this order no later trial is better than an earlier one; equal ones are neighbours.
        if not any(_dominates(merits[other], merits[trial]) for other in front):
            front.append(trial)
    return front


def cost_words(tokens: float, gpu_hours: float, seconds: float) -> str:
    """Returns tokens, GPU hours and seconds as a short text. A 0 means unknown and is left out.

    Example:
        >>> cost_words(1_234_567, 0.0, 5400)
        '1.235M tokens, 1.5 h'
    """
    parts = [f"{number(tokens)} tokens"] if tokens else []
    parts += [f"{gpu_hours:.2g} GPU hours" if gpu_hours < 10 else f"{number(gpu_hours)} GPU hours"] if gpu_hours else []
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            parts.append(f"{seconds / size:.3g} {unit}")
            break
    return ", ".join(parts)


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(left >= right for left, right in zip(one, other, strict=True))


def _merits(record: StudyRecord, trial: Trial) -> tuple[float, ...]:
    return tuple(goal.better(value) for goal, value in zip(record.goals, trial.values, strict=True))


def _eligible(record: StudyRecord) -> list[Trial]:
    return [trial for trial in record.finished if trial.feasible]


def _units(arm: Mapping[str, Any]) -> tuple[Unit, ...]:
    return tuple(
        Unit(
            unit["seed"],
            unit.get("run_id") or "",
            unit["state"],
            _value_of_unit(unit),
            unit.get("reason") or "",
            {name: at for name, at in (unit.get("constraints") or {}).items() if at is not None},
        )
        for unit in arm.get("units") or ()
    )


def _value_of_unit(unit: Mapping[str, Any]) -> float | None:
    return unit.get("value") if unit["state"] == "finished" else None


def _rung(data: Mapping[str, Any]) -> Interval:
    value = data.get("value")
    return _interval(math.nan if value is None else value, data.get("low"), data.get("high"))


def _expected(data: Mapping[str, Any], goal: Goal) -> Interval | None:
    mean, deviation = data.get("posterior_mean"), data.get("posterior_deviation")
    if mean is None or deviation is None:
        return None
    value, low, high = (goal.possible(mean + steps * deviation) for steps in (0.0, -1.96, 1.96))
    return Interval(value, low, high)


def _interval(value: float, low: float | None, high: float | None) -> Interval:
    return Interval(value, math.nan if low is None else low, math.nan if high is None else high)
