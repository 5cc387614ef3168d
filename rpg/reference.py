"""When the reference policy moves: pure bookkeeping, no weights. The trainer copies the weights when told to."""

from dataclasses import dataclass
from typing import Any

from specs.schema.reference import Reference


@dataclass
class ReferenceSchedule:
    """Counts steps since the last move and says when the next is due. Its state is part of every checkpoint."""

    follows: bool = False
    """Whether the reference is the behaviour policy: another one each step, with nothing to copy."""
    every_steps: int = 0
    """Steps between two moves; 0: never by count."""
    version: int = 0
    """Moves so far."""
    age_steps: int = 0
    """Steps finished since the last move, or since the start."""

    @classmethod
    def of(cls, reference: Reference) -> "ReferenceSchedule":
        """The schedule of a spec's reference."""
        return cls(
            follows=reference.source == "behaviour",
            every_steps=reference.update.every_steps if reference.update else 0,
        )

    def after_step(self, kl_reverse: float) -> bool:
        """Tells the schedule that a step ended with this mean `kl/reverse` (nats); True: copy the policy into the reference now."""
        self.age_steps += 1
        if self.follows:
            self.version += 1
            self.age_steps = 0
            return False
        if not self.every_steps or self.age_steps < self.every_steps:
            return False
        self.version += 1
        self.age_steps = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """All that changes, JSON-able."""
        return {"version": self.version, "age_steps": self.age_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self.version = int(state["version"])
        self.age_steps = int(state["age_steps"])
