"""A study's trials as they are kept in Optuna's storage, and who is at work on them.

Optuna's own states cannot say that a trial waits at a rung: a paused trial is RUNNING there, and its `work` attribute
tells the rest. Everything that one decision changes of a trial's work is one attribute, written at once.
"""

import math
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from pipelines.studies.samplers import optuna_inside
from specs.machine.files import now
from specs.machine.liveness import is_alive, place_of, start_of
from specs.schema.study import Study, measure_label
from specs.study_space import Params

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

State = Literal["pending", "running", "paused", "finished", "pruned", "failed"]
BEAT_SECONDS = 20.0
"""Between two signs of life of a worker."""
SILENT_SECONDS = 120.0
"""After which a worker of another machine counts as dead; the machines' clocks have to agree to well within that. One
of this machine is looked at directly."""


class StudyInterruptedError(Exception):
    """The command was asked to stop; the trial under way goes on at the next call."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that works on trials."""

    id: str
    host: str
    pid: int
    pid_started: str
    place: str = ""
    """The study's directory in its home: `specs.machine.liveness.place_of`; empty if none was recorded."""

    @classmethod
    def this(cls, directory: Path | None = None) -> "Worker":
        """A new worker of this process, at the study of that directory."""
        place = place_of(directory) if directory else ""
        return cls(uuid.uuid4().hex[:12], socket.gethostname(), os.getpid(), start_of(os.getpid()), place)


@dataclass(frozen=True, slots=True)
class Work:
    """Work under way on a trial that has not ended."""

    until: int = 0
    """The step to train to; 0: the end."""
    paused: bool = False
    """It waits at a rung, whether it may go on."""
    worker: Worker | None = None
    """Who is at work on it; None: nobody yet."""
    beat: str = ""
    """When the worker last gave a sign of life."""

    def is_abandoned(self, seen_by: Worker) -> bool:
        """Whether somebody has to take the work up: nobody has, or the one who did is gone."""
        if self.paused:
            return False
        return self.worker is None or not _lives(self.worker, self.beat, seen_by)

    def plain(self) -> dict[str, Any]:
        """The work as JSON data."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Mapping[str, Any], beat: Mapping[str, str]) -> "Work":
        """Reads what `plain` wrote; `beat`: when which worker gave a later sign of life.

        A worker that was given up for dead may still give signs of life; they are not those of its successor.
        """
        worker = Worker(**plain["worker"]) if plain["worker"] else None
        later = beat["at"] if worker and beat and beat["worker"] == worker.id else ""
        return cls(plain["until"], plain["paused"], worker, max(plain["beat"], later))


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
        """The value and its interval as JSON data."""
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


def read_trial(frozen: "FrozenTrial") -> Trial:
    """A trial of the storage."""
    about = frozen.user_attrs
    work = Work.read(about["work"], about.get("beat", {}))
    return Trial(
        id=optuna_inside.trial_id(frozen),
        number=frozen.number,
        state=_state(frozen, work),
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


def _state(frozen: "FrozenTrial", work: Work) -> State:
    if frozen.state.name == "RUNNING":
        return "paused" if work.paused else "pending" if work.worker is None else "running"
    if frozen.state.name == "PRUNED":
        # The sampler is to keep away from what fails for its values; to the user it has failed.
        return "failed" if frozen.user_attrs.get("at_fault") else "pruned"
    states: dict[str, State] = {"WAITING": "pending", "COMPLETE": "finished", "FAIL": "failed"}
    return states[frozen.state.name]


def _lives(worker: Worker, beat: str, seen_by: Worker) -> bool:
    # One at a copy of the study, or with another home, is known by its signs of life alone.
    if worker.host == seen_by.host and worker.place in ("", seen_by.place):
        return is_alive(worker.pid, worker.pid_started)
    silent = datetime.now(UTC) - datetime.fromisoformat(beat) if beat else None
    return silent is not None and silent.total_seconds() < SILENT_SECONDS


@contextmanager
def signs_of_life(storage: "BaseStorage", trial: Trial) -> Iterator[None]:
    """Within the block the trial's worker gives a sign of life every BEAT_SECONDS."""
    ended = threading.Event()
    worker = trial.work.worker.id if trial.work.worker else ""

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            # A database that is away for a while costs signs of life, never the trial.
            with suppress(Exception):
                storage.set_trial_user_attr(trial.id, "beat", {"worker": worker, "at": now()})

    thread = threading.Thread(target=beat, name="signs-of-life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
