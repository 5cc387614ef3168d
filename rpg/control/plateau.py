"""Plateaus: evaluations in a row that show no gain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rpg.statistics.intervals import gain_interval


@dataclass(frozen=True, slots=True)
class SetScores:
    """The scores on an evaluation set."""

    scores: list[float]
    """Mean score of each problem, in the set's order."""
    clusters: Sequence[str] | None = None
    """Cluster of each problem; None if each problem is its own cluster."""


@dataclass
class Plateau:
    """A count of evaluations in a row without a gain over the best one so far. Its state is part of every
    checkpoint."""

    evaluations: int
    """Number of evaluations that make a plateau. 0 disables it."""
    confidence: float = 0.95
    """Level of the interval of a gain."""
    count: int = 0
    best: dict[str, list[float]] = field(default_factory=dict)
    """Best scores so far on each set. New scores are better if the interval of their gain, paired by problem, is above
    0."""

    def reached(self, measured: Mapping[str, SetScores]) -> bool:
        """Counts an evaluation. Returns whether it completes a plateau, after which the count starts again."""
        if not self.evaluations or not measured:
            return False
        first = not self.best
        gains = {name: each.scores for name, each in measured.items() if first or self._gains(name, each)}
        if gains:
            self.best |= gains
            self.count = 0
            return False
        self.count += 1
        if self.count < self.evaluations:
            return False
        self.count = 0
        return True

    def _gains(self, name: str, measured: SetScores) -> bool:
        before = self.best.get(name)
        if before is None:
            return False
        clusters = measured.clusters
        return gain_interval(before, measured.scores, confidence=self.confidence, clusters=clusters).low > 0

    def state_dict(self) -> dict[str, Any]:
        """Returns all that changes, as plain values for JSON."""
        return {"count": self.count, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`."""
        self.count, self.best = int(state["count"]), {name: list(scores) for name, scores in state["best"].items()}
