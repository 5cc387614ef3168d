"""Watches a run's metrics against the spec's guards and records the roll-backs.

The number of consecutive steps that violated a guard is part of every checkpoint. The roll-backs are not: they have
their own file, since a return to a checkpoint must not erase the fact that the run rolled back. The learning rate
depends only on that file and the step, so a run that is killed and resumed uses the same rates as without the kill.
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
    """A roll-back, as recorded in the run's guards.json."""

    guard: int
    """Index of the guard that requested it."""
    at_step: int
    """Step after which the guard fired."""
    to_step: int
    """The step of the checkpoint from which training resumed."""
    learning_rate_factor: float
    """Factor on the learning rate of every step after `to_step`."""


@dataclass(frozen=True, slots=True)
class FiredGuard:
    """A guard that has fired after a step."""

    guard: Guard
    index: int
    """Index among the run's guards, from 0."""
    step: int
    since: int
    """First of the consecutive steps that violated the guard."""
    message: str


class GuardStoppedError(RuntimeError):
    """Error that a guard raises to end the run."""


class RollBackRequested(Exception):  # noqa: N818  # a request, no error
    """Request by a guard for a roll-back, which the training loop carries out."""

    def __init__(self, fired: FiredGuard) -> None:
        super().__init__(fired.message)
        self.fired = fired


class Guards:
    """The guards of a run. All ranks see the same metrics and reach the same decisions."""

    def __init__(self, guards: Sequence[Guard], file: Path) -> None:
        """Reads earlier roll-backs from `file`, which need not exist yet."""
        has_not_finite = any(guard.metric == "not_finite" for guard in guards)
        self._guards = tuple(guards) if has_not_finite else (*guards, _ALWAYS)
        self._file = file
        self._streaks = [0] * len(self._guards)
        entries = json.loads(file.read_bytes()) if file.exists() else []
        self.roll_backs = [RollBack(**entry) for entry in entries]

    def check(self, step: int, metrics: Mapping[str, float]) -> list[FiredGuard]:
        """Returns the guards that fire after a step with these metrics. A guard that only warns fires once per streak.

        A step that lacks the metric does not end a streak.
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
        """Fires the not_finite guard in the middle of a step, before the step has metrics."""
        index = next(index for index, guard in enumerate(self._guards) if guard.metric == "not_finite")
        return self._fire(index, step, message)

    def may_roll_back(self, fired: FiredGuard) -> bool:
        """Returns whether the guard rolls back and has done so fewer than `at_most` times."""
        made = sum(entry.guard == fired.index for entry in self.roll_backs)
        return fired.guard.action == "roll_back" and made < fired.guard.at_most

    def roll_back_bounds(self, fired: FiredGuard) -> list[int]:
        """Returns upper bounds on the step of the checkpoint to roll back to: one bound, or two to try in this order.

        The checkpoint precedes the violation. If the guard rolled back before and the run did not get past this step,
        the first bound selects an earlier checkpoint than the one used that time.
        """
        no_help = [
            entry.to_step for entry in self.roll_backs if entry.guard == fired.index and entry.at_step >= fired.step
        ]
        return sorted({min([fired.since, *no_help]) - 1, fired.since - 1})

    def record_roll_back(self, fired: FiredGuard, to_step: int, *, write: bool) -> RollBack:
        """Records a roll-back, on disk too if `write` is true; exactly one rank writes."""
        entry = RollBack(fired.index, fired.step, to_step, fired.guard.learning_rate_factor)
        self.roll_backs.append(entry)
        if write:
            write_json(self._file, [asdict(entry) for entry in self.roll_backs], allow_nan=True)
        return entry

    def learning_rate_factor(self, step: int) -> float:
        """Returns the product of the factors of all roll-backs to steps before this one."""
        return math.prod(entry.learning_rate_factor for entry in self.roll_backs if step > entry.to_step)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as plain values for JSON."""
        return {"streaks": list(self._streaks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`. If it has a different number of guards, all streaks restart at 0."""
        streaks = state.get("streaks", [])
        self._streaks = list(streaks) if len(streaks) == len(self._guards) else [0] * len(self._guards)

    def _fire(self, index: int, step: int, violation: str) -> FiredGuard:
        guard = self._guards[index]
        since = step - max(self._streaks[index] - 1, 0)
        steps = f" in {guard.for_steps} consecutive steps" if guard.for_steps > 1 else ""
        return FiredGuard(guard, index, step, since, f"step {step}: {violation}{steps}")


def _violation(guard: Guard, metrics: Mapping[str, float]) -> str:
    """Describes how a step's metrics violate the guard; empty if they do not."""
    if guard.metric == "not_finite":
        return ", ".join(
            f"the {name} is {metrics[name]}"
            for name in ("loss", "grad_norm")
            if not math.isfinite(metrics.get(name, 0.0))
        )
    value = metrics[guard.metric]
    if math.isnan(value):
        return f"{guard.metric} is not a number"
    if guard.above is not None and value > guard.above:
        return f"{guard.metric} {value:.4g} is above {guard.above:g}"
    if guard.below is not None and value < guard.below:
        return f"{guard.metric} {value:.4g} is below {guard.below:g}"
    return ""
