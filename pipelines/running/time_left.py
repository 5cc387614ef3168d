"""Remaining time of a command's runs, estimated from the durations of its finished stages."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from pipelines.planning.plan import RunPlan, StagePlan

_SHARED = ("data", "base")
"""Stages whose result is made once, for all runs that need it."""


@dataclass
class _Run:
    plan: RunPlan
    to_do: list[StagePlan]
    """Stages that have not ended, including the current one."""
    stage: str = ""
    """The current stage; empty between stages."""
    since: float = 0.0
    """Time at which the current stage began, by `clock`."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's progress, while it trains."""


class TimeLeft:
    """Remaining time of several runs. It receives the runs' events, and `words` gives the estimate.

    A stage is expected to take the mean time of the same stage in this command's other runs, training by its steps.
    Until each kind of stage has ended once, the estimate is only a lower bound.
    """

    def __init__(
        self, runs: Sequence[RunPlan], at_once: int = 1, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`at_once`: number of runs that execute at a time."""
        self._runs = {
            run.run_id: _Run(run, [stage for stage in run.stages if stage.action != "CACHED"]) for run in runs
        }
        self._at_once = at_once
        self._clock = clock
        self._took: dict[str, list[float]] = {}
        """Stage -> seconds of each finished one; for training, seconds per step."""
        self.ended = 0
        """Number of runs that have ended."""

    @property
    def total(self) -> int:
        """Number of runs."""
        return len(self._runs)

    def stage_started(self, run_id: str, stage: str) -> None:
        """Notes that a stage of a run has begun."""
        run = self._runs[run_id]
        run.stage, run.since, run.training = stage, self._clock(), {}

    def training(self, run_id: str, progress: Mapping[str, Any]) -> None:
        """Notes the trainer's progress.json."""
        self._runs[run_id].training = progress

    def stage_ended(self, run_id: str, stage: str, outcome: str, seconds: float) -> None:
        """Notes that the current stage has ended: done, cached, failed, stopped or paused."""
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
        """Notes that a run has ended, with any status."""
        run = self._runs[run_id]
        run.stage, run.to_do = "", []
        self.ended += 1

    def words(self) -> str:
        """Returns `about 12 min left`, `at least 40 s left`; empty if everything has ended or nothing is known yet."""
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
        """Returns the seconds that a stage of a run still takes; None if they are unknown."""
        under_way = run.stage == stage
        if under_way and stage == "train" and (left := training_seconds_left(run.training)):
            return left
        if stage not in self._took:
            # While another run trains for the first time, its steps give the time of a step.
            if stage == "train" and (rates := [rate for other in self._runs.values() if (rate := _rate(other))]):
                return fmean(rates) * run.plan.experiment.training.steps
            return None
        whole = fmean(self._took[stage]) * (run.plan.experiment.training.steps if stage == "train" else 1)
        return max(0.0, whole - (self._clock() - run.since)) if under_way else whole


def training_seconds_left(progress: Mapping[str, Any]) -> float:
    """Returns the seconds that training still takes, estimated from its last step, without evaluations; 0 if
    unknown."""
    metrics = progress.get("metrics") or {}
    seconds = (metrics.get("time/step") or 0.0) - (metrics.get("time/evaluate") or 0.0)
    return float(seconds * max(0, int(progress.get("steps", 0)) - int(progress.get("step", 0))))


def _rate(run: _Run) -> float:
    """Returns the seconds per step of a run that trains; 0 if unknown."""
    steps = int(run.training.get("steps", 0)) - int(run.training.get("step", 0))
    return training_seconds_left(run.training) / steps if run.stage == "train" and steps > 0 else 0.0


def duration(seconds: float) -> str:
    """Returns seconds as text in a suitable unit: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
