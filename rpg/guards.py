"""Watches a run's figures: streaks of trouble, what a guard then does, and the learning rate after a roll-back.

The streaks are part of every checkpoint. The roll-backs are not: they lie in a ledger of their own, since going back to
a checkpoint must not forget that one went back. The learning rate follows from the ledger and the step alone, so a run
that is killed and goes on has the rates that it would have had.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rpg.files import replace_json
from specs.schema.guard import Guard

_ALWAYS = Guard(metric="not_finite")


@dataclass(frozen=True, slots=True)
class RollBack:
    """One entry of the ledger."""

    guard: int
    """Which of the spec's guards."""
    at_step: int
    to_step: int
    learning_rate_factor: float
    """Of every step after `to_step`."""


@dataclass(frozen=True, slots=True)
class Fired:
    """A guard that acts now."""

    guard: Guard
    number: int
    """Which of the run's guards, from 0."""
    step: int
    since: int
    """The first step of the trouble."""
    message: str


class GuardStoppedError(RuntimeError):
    """A guard ends the run."""


class RollBackRequested(Exception):  # noqa: N818  # a request, no error
    """A guard asks to go back; for the loop, which does so."""

    def __init__(self, fired: Fired) -> None:
        super().__init__(fired.message)
        self.fired = fired


class Guards:
    """A run's guards. All ranks see the same figures and come to the same decisions."""

    def __init__(self, guards: Sequence[Guard], ledger: Path) -> None:
        watched = any(guard.metric == "not_finite" for guard in guards)
        self._guards = tuple(guards) if watched else (*guards, _ALWAYS)
        self._ledger = ledger
        self._streaks = [0] * len(self._guards)
        entries = json.loads(ledger.read_bytes()) if ledger.exists() else []
        self.roll_backs = [RollBack(**entry) for entry in entries]

    def after_step(self, step: int, figures: Mapping[str, float]) -> list[Fired]:
        """The guards that act after a step with these figures."""
        fired = []
        for number, guard in enumerate(self._guards):
            said = _trouble(guard, figures)
            self._streaks[number] = self._streaks[number] + 1 if said else 0
            streak = self._streaks[number]
            if streak == guard.for_steps or (streak > guard.for_steps and guard.action != "warn"):
                fired.append(self._fired(number, step, said))
        return fired

    def not_a_number(self, step: int, message: str) -> Fired:
        """What becomes of a step in whose middle the gradient is no number: the guard on that acts at once."""
        number = next(number for number, guard in enumerate(self._guards) if guard.metric == "not_finite")
        return self._fired(number, step, message)

    def exhausted(self, fired: Fired) -> bool:
        """Whether the guard has gone back as often as it may."""
        return sum(entry.guard == fired.number for entry in self.roll_backs) >= fired.guard.at_most

    def where_to(self, fired: Fired) -> list[int]:
        """Up to which step the checkpoint may be, best first: before the trouble, and where going back to a checkpoint
        did not get this guard past the step, before that one."""
        tried = [
            entry.to_step for entry in self.roll_backs if entry.guard == fired.number and entry.at_step >= fired.step
        ]
        return sorted({min([fired.since, *tried]) - 1, fired.since - 1})

    def note(self, fired: Fired, to_step: int, *, write: bool) -> RollBack:
        """Puts a roll-back on record, and on disk where `write` says so: on one rank."""
        entry = RollBack(fired.number, fired.step, to_step, fired.guard.learning_rate_factor)
        self.roll_backs.append(entry)
        if write:
            replace_json(self._ledger, [asdict(entry) for entry in self.roll_backs], durable=True)
        return entry

    def rate_factor(self, step: int) -> float:
        """What the learning rate of a step is multiplied by."""
        return math.prod(entry.learning_rate_factor for entry in self.roll_backs if step > entry.to_step)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-able."""
        return {"streaks": list(self._streaks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict` of the same guards; one of others is forgotten."""
        streaks = state.get("streaks", [])
        self._streaks = list(streaks) if len(streaks) == len(self._guards) else [0] * len(self._guards)

    def _fired(self, number: int, step: int, said: str) -> Fired:
        guard = self._guards[number]
        since = step - max(self._streaks[number] - 1, 0)
        steps = f" in {guard.for_steps} steps one after another" if guard.for_steps > 1 else ""
        return Fired(guard, number, step, since, f"step {step}: {said}{steps}")


def _trouble(guard: Guard, figures: Mapping[str, float]) -> str:
    """What is wrong; empty where nothing is."""
    if guard.metric == "not_finite":
        wrong = [f"the {name} is {figures[name]}" for name in ("loss", "grad_norm") if not math.isfinite(figures[name])]
        return ", ".join(wrong)
    value = figures[guard.metric]
    if math.isnan(value):
        return f"{guard.metric} is no number"
    if guard.above is not None and value > guard.above:
        return f"{guard.metric} {value:.4g} is above {guard.above:g}"
    if guard.below is not None and value < guard.below:
        return f"{guard.metric} {value:.4g} is below {guard.below:g}"
    return ""
