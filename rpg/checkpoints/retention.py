"""Which checkpoints stay when a new one comes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from specs.schema.training import Checkpoint


@dataclass(frozen=True, slots=True)
class Retention:
    """The newest few; those of certain steps; the best by a figure."""

    last: int
    """At least 1."""
    every: int = 0
    """Those of its multiples, steps; 0: none for that."""
    best: str = ""
    """Name of the figure; empty: none for that."""
    mode: Literal["max", "min"] = "max"
    """Which of its values is the best."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Retention":
        """As a spec says."""
        best = checkpoint.keep_best
        kept = cls(checkpoint.keep_last, checkpoint.keep_every)
        return replace(kept, best=best.metric, mode=best.mode) if best else kept

    def kept(self, published: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps to keep, of those published and the figures noted with each. Of equals the later is the best.

        Example:
            >>> reward = {10: {"reward": 0.9}, 20: {"reward": 0.4}, 30: {"reward": 0.5}, 40: {}}
            >>> sorted(Retention(last=1, every=20, best="reward").kept(reward))
            [10, 20, 40]
        """
        kept = set(sorted(published)[-self.last :])
        if self.every:
            kept |= {step for step in published if step % self.every == 0}
        sign = 1 if self.mode == "max" else -1
        known = [(sign * figures[self.best], step) for step, figures in published.items() if self.best in figures]
        return kept | {max(known)[1]} if known else kept


class Means:
    """Figures' means over the steps since they were last taken."""

    def __init__(self) -> None:
        self._seen: list[Mapping[str, float]] = []

    def add(self, figures: Mapping[str, float]) -> None:
        """A step's."""
        self._seen.append(figures)

    def take(self) -> dict[str, float]:
        """The means, of figures that every step had; from then on it counts anew."""
        seen, self._seen = self._seen, []
        names = set.intersection(*(set(figures) for figures in seen)) if seen else set()
        return {name: sum(figures[name] for figures in seen) / len(seen) for name in sorted(names)}
