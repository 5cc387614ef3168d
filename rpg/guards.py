"""Watches a run's metrics against the spec's guards, and remembers the roll-backs.

How many steps in a row violated a guard is part of every checkpoint. The roll-backs are not: they have a file of their
own, since going back to a checkpoint must not forget that the run went back. The learning rate follows from that file
and the step alone, so a run that is killed and resumed has the rates that it would have had.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specs.machine.files import write_json
from specs.schema.training import Guard

_ALWAYS = Guard(metric="not_finite")


@dataclass(frozen=True, slots=True)
class RollBack:
    """One roll-back, as the run's guards.json has it."""

    guard: int
    """Index of the guard that asked for it."""
    at_step: int
    """The step after which the guard fired."""
    to_step: int
    """The step of the checkpoint that training went on from."""
    learning_rate_factor: float
    """Multiplies the learning rate of every step after `to_step`."""


@dataclass(frozen=True, slots=True)
class FiredGuard:
    """A guard that acts after a step."""

    guard: Guard
    index: int
    """Among the run's guards, from 0."""
    step: int
    since: int
    """The first of the consecutive steps that violated it."""
    message: str


class GuardStoppedError(RuntimeError):
    """A guard ends the run."""


class RollBackRequested(Exception):  # noqa: N818  # a request, no error
    """A guard asks for a roll-back; the training loop makes it."""

    def __init__(self, fired: FiredGuard) -> None:
        super().__init__(fired.message)
        self.fired = fired


class Guards:
    """A run's guards. All ranks see the same metrics and come to the same decisions."""

    def __init__(self, guards: Sequence[Guard], file: Path) -> None:
        """`file`: where the run's roll-backs stand; it need not exist yet."""
        has_not_finite = any(guard.metric == "not_finite" for guard in guards)
        self._guards = tuple(guards) if has_not_finite else (*guards, _ALWAYS)
        self._file = file
        self._streaks = [0] * len(self._guards)
        entries = json.loads(file.read_bytes()) if file.exists() else []
        self.roll_backs = [RollBack(**entry) for entry in entries]

    def check(self, step: int, metrics: Mapping[str, float]) -> list[FiredGuard]:
        """Returns the guards that act after a step with these metrics; one that warns does so once a streak.

        A streak goes on after a step that lacks the metric.
        """
        fired = []
        for index, guard in enumerate(self._guards):
            if guard.metric != "not_finite" and guard.metric not in metrics:
                continue
            violation = _violation(guard, metrics)
            self._streaks[index] = self._streaks[index] + 1 if violation else 0
            streak = self._streaks[index]
            if streak == guard.for_steps or (streak > guard.for_steps and guard.action != "warn"):
                fired.append(self._fire(index, step, violation))
        return fired

    def fire_not_finite(self, step: int, message: str) -> FiredGuard:
        """Fires the not_finite guard in the middle of a step, which has no metrics yet."""
        index = next(index for index, guard in enumerate(self._guards) if guard.metric == "not_finite")
        return self._fire(index, step, message)

    def may_roll_back(self, fired: FiredGuard) -> bool:
        """Whether the guard rolls back, and has not yet done so `at_most` times."""
        made = sum(entry.guard == fired.index for entry in self.roll_backs)
        return fired.guard.action == "roll_back" and made < fired.guard.at_most

    def roll_back_bounds(self, fired: FiredGuard) -> list[int]:
        """The latest step that the checkpoint to go back to may have: one bound, or two to be tried in this order.

        The checkpoint is from before the violation. Where the guard went back before and did not get past this step,
        an earlier checkpoint than that time is tried first.
        """
        no_help = [
            entry.to_step for entry in self.roll_backs if entry.guard == fired.index and entry.at_step >= fired.step
        ]
        return sorted({min([fired.since, *no_help]) - 1, fired.since - 1})

    def record_roll_back(self, fired: FiredGuard, to_step: int, *, write: bool) -> RollBack:
        """Remembers a roll-back; on disk too where `write` is true, which is one rank's part."""
        entry = RollBack(fired.index, fired.step, to_step, fired.guard.learning_rate_factor)
        self.roll_backs.append(entry)
        if write:
            write_json(self._file, [asdict(entry) for entry in self.roll_backs], allow_nan=True)
        return entry

    def learning_rate_factor(self, step: int) -> float:
        """The product of the factors of all roll-backs to a step before this one."""
        return math.prod(entry.learning_rate_factor for entry in self.roll_backs if step > entry.to_step)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, JSON-able."""
        return {"streaks": list(self._streaks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`; one of another number of guards starts all streaks anew."""
        streaks = state.get("streaks", [])
        self._streaks = list(streaks) if len(streaks) == len(self._guards) else [0] * len(self._guards)

    def _fire(self, index: int, step: int, violation: str) -> FiredGuard:
        guard = self._guards[index]
        since = step - max(self._streaks[index] - 1, 0)
        steps = f" in {guard.for_steps} steps one after another" if guard.for_steps > 1 else ""
        return FiredGuard(guard, index, step, since, f"step {step}: {violation}{steps}")


def _violation(guard: Guard, metrics: Mapping[str, float]) -> str:
    """How a step's metrics violate the guard; empty where they do not."""
    if guard.metric == "not_finite":
        return ", ".join(
            f"the {name} is {metrics[name]}"
            for name in ("loss", "grad_norm")
            if not math.isfinite(metrics.get(name, 0.0))
        )
    value = metrics[guard.metric]
    if math.isnan(value):
        return f"{guard.metric} is no number"
    if guard.above is not None and value > guard.above:
        return f"{guard.metric} {value:.4g} is above {guard.above:g}"
    if guard.below is not None and value < guard.below:
        return f"{guard.metric} {value:.4g} is below {guard.below:g}"
    return ""
