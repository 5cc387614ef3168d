"""When the reference policy moves: pure bookkeeping, no weights. The trainer copies the weights when told to."""

from collections import deque
from typing import Any

from specs.schema.reference import Reference, Update


class ReferenceSchedule:
    """Counts steps since the last move and says when the next is due. Its state is part of every checkpoint."""

    def __init__(self, *, follows: bool, update: Update | None) -> None:
        self._follows = follows
        self._update = update
        self.version = 0
        """Moves so far; with source behaviour one a step."""
        self.age_steps = 0
        """Steps finished since the last move, or since the start."""
        self.steps = 0
        """Steps finished."""
        self.reason = ""
        """Why it last moved; empty where it never did."""
        self._recent: deque[float] = deque(maxlen=update.kl_window if update else 1)

    @classmethod
    def of(cls, reference: Reference) -> "ReferenceSchedule":
        """The schedule of a spec's reference."""
        return cls(follows=reference.source == "behaviour", update=reference.update)

    @property
    def ema_decay(self) -> float:
        """Share of the reference's own weights that a move keeps: reference = decay * reference + (1 - decay) *
        policy."""
        return self._update.ema_decay if self._update else 0.0

    def after_step(self, kl_reverse: float) -> bool:
        """Tells the schedule that a step ended with this mean `kl/reverse` (nats); True: move the weights now.

        With source behaviour the version counts on and there is nothing to copy, so the answer is False.
        """
        self.steps += 1
        self.age_steps += 1
        self._recent.append(kl_reverse)
        reason = "another policy samples" if self._follows else self._due()
        if not reason:
            return False
        self.version += 1
        self.age_steps = 0
        self.reason = reason
        self._recent.clear()
        return not self._follows

    def _due(self) -> str:
        """Why it moves now; empty: it does not."""
        update = self._update
        if update is None or self.steps < update.after_steps:
            return ""
        if update.kl_above and len(self._recent) == update.kl_window:
            mean = sum(self._recent) / update.kl_window
            if mean > update.kl_above:
                return f"mean kl/reverse {mean:.4g} over {update.kl_window} steps exceeds {update.kl_above:.4g}"
        if update.every_steps and self.age_steps >= update.every_steps:
            return f"{self.age_steps} steps since the last move"
        if update.ema_decay and not update.every_steps and not update.kl_above:
            return "every step"
        return ""

    def state_dict(self) -> dict[str, Any]:
        """All that changes, JSON-able."""
        return {
            "version": self.version,
            "age_steps": self.age_steps,
            "steps": self.steps,
            "reason": self.reason,
            "recent": list(self._recent),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict` of the same reference section."""
        self.version = int(state["version"])
        self.age_steps = int(state["age_steps"])
        self.steps = int(state["steps"])
        self.reason = str(state["reason"])
        self._recent.clear()
        self._recent.extend(float(value) for value in state["recent"])
