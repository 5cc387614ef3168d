"""A study's trials as they are kept in Optuna's storage.

Optuna's own states cannot say that a trial waits at a rung: a paused trial is RUNNING there, and its `work` attribute
tells the rest. Everything that one decision changes of a trial's work is one attribute, written at once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from pipelines.studies.samplers import optuna_inside
from specs.schema.study import Study, measure_label
from specs.study_space import Params

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

State = Literal["pending", "running", "paused", "finished", "pruned", "failed"]


class StudyInterruptedError(Exception):
    """The command was asked to stop; the trial under way goes on at the next call."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work left on a trial that has not ended. Who does it now, its lease says."""

    until: int = 0
    """The step to train to; 0: the end."""
    paused: bool = False
    """It waits at a rung, whether it may go on."""


@dataclass(frozen=True, slots=True)
class Score:
    """A measure over a trial's seeds."""

    value: float
    low: float | None
    """Ends of the interval; None where there is none."""
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
    """In the storage."""
    number: int
    """In its study."""
    state: State
    params: dict[str, Any]
    baseline: bool
    work: Work
    rungs: dict[int, Score]
    """What it was worth at each rung that it has reached."""
    values: tuple[float, ...] | None
    """What it is worth at its end, by goal."""
    sampler_notes: Mapping[str, Any] = field(repr=False)
    """What the sampler that proposed it wants to find again."""
    about: Mapping[str, Any] = field(repr=False)
    """Everything else that is recorded of it, by name."""

    @property
    def rung(self) -> int:
        """The last step at which it was evaluated; 0: none yet."""
        return max(self.rungs, default=0)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ("finished", "pruned", "failed")

    @property
    def bracket(self) -> int:
        """How many of the first rungs it passes by (Hyperband)."""
        return int(self.about.get("bracket", 0))

    @property
    def attempts(self) -> int:
        """How often it was begun anew after a failure that was not its own."""
        return int(self.about.get("attempts", 0))


@dataclass(frozen=True, slots=True)
class ForeignResult:
    """A result from elsewhere that the sampler learns from."""

    params: Params
    values: tuple[float, ...]
    measured: Mapping[str, float] = field(default_factory=dict)
    """What constraints bound, by `measure_label`, as far as it is known there."""


def violations(study: Study, measured: Mapping[str, float]) -> dict[str, float]:
    """Amount by which each constraint is missed, at most 0 where it is kept; measured: its value by `measure_label`."""
    missed: dict[str, float] = {}
    for constraint in study.constraints:
        value = measured.get(measure_label(constraint.metric, constraint.dataset), math.nan)
        over = -math.inf if constraint.max is None else value - constraint.max
        under = -math.inf if constraint.min is None else constraint.min - value
        worst = max(over, under)
        missed[measure_label(constraint.metric, constraint.dataset)] = 1e9 if math.isnan(worst) else worst
    return missed


def read_trial(frozen: "FrozenTrial", is_held: Callable[[int], bool]) -> Trial:
    """Returns a trial of the storage.

    Args:
        is_held: number -> whether a worker holds the trial's lease.
    """
    about = frozen.user_attrs
    work = Work(about["work"]["until"], about["work"]["paused"])
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
    """Seconds that unfinished trials still take, as many at a time as are under way now, if each takes what those
    that have ended took on average; 0 where none has.

    Args:
        trials: those of the search that have begun.
        wanted: how many are wanted in all.
    """
    took = [float(trial.about.get("seconds", 0.0)) for trial in trials if trial.ended]
    at_once = max(1, sum(trial.state == "running" for trial in trials))
    return fmean(took) * max(0, wanted - len(took)) / at_once if took else 0.0


def _state(frozen: "FrozenTrial", work: Work, is_held: Callable[[int], bool]) -> State:
    if frozen.state.name == "RUNNING":
        return "paused" if work.paused else "running" if is_held(frozen.number) else "pending"
    if frozen.state.name == "PRUNED":
        # The sampler is to keep away from what fails for its values; to the user it has failed.
        return "failed" if frozen.user_attrs.get("at_fault") else "pruned"
    states: dict[str, State] = {"WAITING": "pending", "COMPLETE": "finished", "FAIL": "failed"}
    return states[frozen.state.name]
