"""How long the runs of a command will still take, from what its stages have taken so far."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from pipelines.planning.plan import RunPlan, StagePlan

_SHARED = ("data", "base")
"""Stages whose result all runs that need it share: made once."""


@dataclass
class _Run:
    plan: RunPlan
    to_do: list[StagePlan]
    """Stages that have not ended, the one under way among them."""
    stage: str = ""
    """The one under way; empty: none."""
    since: float = 0.0
    """When it began, by the clock."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's progress, while it trains."""


class TimeLeft:
    """The time that is left for several runs. Told what happens, it is asked whenever there is something to show.

    A stage that nobody has done yet in this command takes what the others took on average, training by its steps. So
    before each kind of stage has been done once there is a lower bound only.
    """

    def __init__(
        self, runs: Sequence[RunPlan], at_once: int = 1, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`at_once`: so many are executed at a time."""
        self._runs = {
            run.run_id: _Run(run, [stage for stage in run.stages if stage.action != "CACHED"]) for run in runs
        }
        self._at_once = at_once
        self._clock = clock
        self._took: dict[str, list[float]] = {}
        """Stage -> seconds of those that were done; of training, seconds a step."""
        self.ended = 0
        """Runs that nothing more will be done for."""

    @property
    def total(self) -> int:
        """How many runs there are."""
        return len(self._runs)

    def stage_started(self, run_id: str, stage: str) -> None:
        """A stage of a run is under way."""
        run = self._runs[run_id]
        run.stage, run.since, run.training = stage, self._clock(), {}

    def training(self, run_id: str, progress: Mapping[str, Any]) -> None:
        """The trainer's progress.json."""
        self._runs[run_id].training = progress

    def stage_ended(self, run_id: str, stage: str, outcome: str, seconds: float) -> None:
        """The stage under way has ended: done, cached, failed, stopped or paused."""
        run = self._runs[run_id]
        run.stage = ""
        if outcome == "done":
            steps = run.plan.experiment.training.steps
            self._took.setdefault(stage, []).append(seconds / steps if stage == "train" else seconds)
        if outcome in ("done", "cached"):
            ended = run.plan.stage(stage).fingerprint
            for sharing in self._runs.values() if stage in _SHARED else [run]:
                sharing.to_do = [to_do for to_do in sharing.to_do if (to_do.stage, to_do.fingerprint) != (stage, ended)]

    def run_ended(self, run_id: str) -> None:
        """Nothing more is done for a run, however it ended."""
        run = self._runs[run_id]
        run.stage, run.to_do = "", []
        self.ended += 1

    def words(self) -> str:
        """`about 12 min left`, `at least 40 s left`; empty where nothing is left or nothing is known yet."""
        seconds, unknown, shared, longest = 0.0, False, set[tuple[str, str]](), 0.0
        for run in self._runs.values():
            alone = 0.0
            for stage in run.to_do:
                made_once = (stage.stage, stage.fingerprint)
                if made_once in shared:
                    continue
                if stage.stage in _SHARED:
                    shared.add(made_once)
                expected = self._expected(run, stage.stage)
                unknown = unknown or expected is None
                alone += expected or 0.0
            seconds, longest = seconds + alone, max(longest, alone)
        left = max(seconds / self._at_once, longest)
        return f"{'at least' if unknown else 'about'} {duration(left)} left" if left else ""

    def _expected(self, run: _Run, stage: str) -> float | None:
        """Seconds that a stage of a run still takes; None where nothing is known of it."""
        under_way = run.stage == stage
        if under_way and stage == "train" and (left := training_seconds_left(run.training)):
            return left
        if stage not in self._took:
            # While another run trains for the first time, its steps say what a step takes.
            if stage == "train" and (rates := [rate for other in self._runs.values() if (rate := _rate(other))]):
                return fmean(rates) * run.plan.experiment.training.steps
            return None
        whole = fmean(self._took[stage]) * (run.plan.experiment.training.steps if stage == "train" else 1)
        return max(0.0, whole - (self._clock() - run.since)) if under_way else whole


def training_seconds_left(progress: Mapping[str, Any]) -> float:
    """Seconds that training still takes by its last step, evaluations aside; 0 where that is not known."""
    metrics = progress.get("metrics") or {}
    seconds = (metrics.get("time/step") or 0.0) - (metrics.get("time/evaluate") or 0.0)
    return float(seconds * max(0, int(progress.get("steps", 0)) - int(progress.get("step", 0))))


def _rate(run: _Run) -> float:
    """Seconds a step, of a run that trains; 0 where it is not known."""
    steps = int(run.training.get("steps", 0)) - int(run.training.get("step", 0))
    return training_seconds_left(run.training) / steps if run.stage == "train" and steps > 0 else 0.0


def duration(seconds: float) -> str:
    """In the unit that suits it: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
