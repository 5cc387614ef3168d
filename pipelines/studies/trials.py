"""A study's trials in Optuna's storage.

Optuna has no state for a trial that waits at a rung: a paused trial is RUNNING there, and its `work` attribute has the
rest. All changes of one decision to a trial's work are in one attribute, written at once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from pipelines.studies.samplers import optuna_inside
from specs.schema.study import Study, measure_label
from specs.study_space import Params

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

State = Literal["pending", "running", "paused", "finished", "pruned", "failed", "cancelled"]


class StudyInterruptedError(Exception):
    """Interruption of a study because the command was asked to stop. The current trial continues at the next call."""


@dataclass(frozen=True, slots=True)
class Work:
    """The remaining work on a trial. The trial's lease names the present worker."""

    until: int = 0
    """The step to train to; 0 means the end."""
    paused: bool = False
    """Whether it waits at a rung for a promotion."""
    cancelled_at: str = ""
    """Time at which one of the trial's runs was cancelled, UTC, ISO-8601; empty if none was."""


@dataclass(frozen=True, slots=True)
class Score:
    """A measure over a trial's seeds."""

    value: float
    low: float | None
    """Lower end of the interval; None, like the upper end, without an interval."""
    high: float | None
    by_seed: tuple[float, ...] = ()
    """The value of each seed."""

    def plain(self) -> dict[str, Any]:
        """Returns the value and its interval as JSON data."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial, of the search or of the confirmation."""

    id: int
    """Id in the storage."""
    number: int
    """Number in its study."""
    state: State
    params: dict[str, Any]
    baseline: bool
    work: Work
    rungs: dict[int, Score]
    """Value at each rung that the trial has reached."""
    values: tuple[float, ...] | None
    """Value at the trial's end, by goal."""
    sampler_notes: Mapping[str, Any] = field(repr=False)
    """The notes of the sampler that proposed it."""
    about: Mapping[str, Any] = field(repr=False)
    """All other recorded attributes, by name."""

    @property
    def rung(self) -> int:
        """Returns the last step at which the trial was evaluated; 0 before the first."""
        return max(self.rungs, default=0)

    @property
    def ended(self) -> bool:
        """Whether the trial has ended. A cancelled trial has ended until the study is run again."""
        return self.state in ("finished", "pruned", "failed", "cancelled")

    @property
    def bracket(self) -> int:
        """Returns the number of rungs that the trial skips at the beginning (Hyperband)."""
        return int(self.about.get("bracket", 0))

    @property
    def attempts(self) -> int:
        """Returns the number of restarts after failures that the trial's values did not cause."""
        return int(self.about.get("attempts", 0))

    def own_cost(self, name: str) -> float:
        """Returns the trial's tokens, gpu_hours or seconds, without the time for data and base model: whichever trial
        makes those, makes them for all."""
        cost, seconds = float(self.about.get(name, 0.0)), float(self.about.get("seconds", 0.0))
        shared = min(float(self.about.get("shared_seconds", 0.0)), seconds)
        return cost * (1 - shared / seconds) if shared and name != "tokens" else cost


@dataclass(frozen=True, slots=True)
class ForeignResult:
    """A result from another study or run that the sampler learns from."""

    params: Params
    values: tuple[float, ...]
    measured: Mapping[str, float] = field(default_factory=dict)
    """Known values of constrained measures, by `measure_label`."""


def violations(study: Study, measured: Mapping[str, float]) -> dict[str, float]:
    """Returns the amount by which each constraint is missed, at most 0 if it is satisfied. `measured`: values by
    `measure_label`."""
    missed: dict[str, float] = {}
    for constraint in study.constraints:
        value = measured.get(measure_label(constraint.metric, constraint.dataset), math.nan)
        over = -math.inf if constraint.max is None else value - constraint.max
        under = -math.inf if constraint.min is None else constraint.min - value
        worst = max(over, under)
        missed[measure_label(constraint.metric, constraint.dataset)] = 1e9 if math.isnan(worst) else worst
    return missed


def read_trial(frozen: "FrozenTrial", is_held: Callable[[int], bool], began: str = "") -> Trial:
    """Returns a trial of the storage.

    Args:
        is_held: number -> whether a worker holds the trial's lease.
        began: time at which the study was run. A trial that was cancelled before is pending again.
    """
    about = frozen.user_attrs
    work = Work(**about["work"])
    if work.cancelled_at < began:
        work = replace(work, cancelled_at="")
    return Trial(
        id=optuna_inside.trial_id(frozen),
        number=frozen.number,
        state=_state(frozen, work, is_held),
        params=dict(about["params"]),
        baseline=bool(about.get("baseline")),
        work=work,
        rungs={int(step): Score(**score) for step, score in about.get("rungs", {}).items()},
        values=tuple(frozen.values) if frozen.state.name == "COMPLETE" else None,
        sampler_notes=frozen.system_attrs,
        about=about,
    )


def seconds_left(trials: Sequence[Trial], wanted: int) -> float:
    """Returns the seconds that unfinished trials still take, if each takes the mean own time of the ended trials and
    as many run at a time as now; 0 if no trial has ended.

    Args:
        trials: trials of the search that have begun.
        wanted: total number of wanted trials.
    """
    took = [trial.own_cost("seconds") for trial in trials if trial.ended]
    at_once = max(1, sum(trial.state == "running" for trial in trials))
    return fmean(took) * max(0, wanted - len(took)) / at_once if took else 0.0


def _state(frozen: "FrozenTrial", work: Work, is_held: Callable[[int], bool]) -> State:
    if frozen.state.name == "RUNNING":
        if work.paused or work.cancelled_at:
            return "paused" if work.paused else "cancelled"
        return "running" if is_held(frozen.number) else "pending"
    if frozen.state.name == "PRUNED":
        # The sampler should avoid values that caused a failure; for the user the trial has failed.
        return "failed" if frozen.user_attrs.get("at_fault") else "pruned"
    states: dict[str, State] = {"WAITING": "pending", "COMPLETE": "finished", "FAIL": "failed"}
    return states[frozen.state.name]
