"""Decides which checkpoints are kept when a new one is published."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from specs.schema.training import Checkpoint


@dataclass(frozen=True, slots=True)
class Retention:
    """A rule that keeps the newest checkpoints, those of every n-th step, and the best by a metric."""

    last: int
    """Number of newest checkpoints to keep, at least 1."""
    every: int = 0
    """Interval in steps. Checkpoints at its multiples are kept. 0 keeps none for this reason."""
    best: str = ""
    """Name of the metric that selects the best checkpoint. Empty keeps none for this reason."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value of the metric is the best."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Retention":
        """Returns the retention that a spec asks for."""
        retention, best = cls(checkpoint.keep_last, checkpoint.keep_every), checkpoint.keep_best
        if best is None:
            return retention
        metric = accuracy_on(best.accuracy_on) if best.accuracy_on else best.metric
        return replace(retention, best=metric, mode=best.mode)

    def kept(self, published: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Returns the steps whose checkpoints are kept. Among equally good ones the latest is the best.

        Args:
            published: step of each checkpoint -> its metrics: those saved with it, see `Means`, and its accuracies.
        Example:
            >>> rewards = {10: {"reward": 0.9}, 20: {"reward": 0.4}, 30: {"reward": 0.5}, 40: {}}
            >>> sorted(Retention(last=1, every=20, best="reward").kept(rewards))
            [10, 20, 40]
        """
        kept = set(sorted(published)[-self.last :])
        if self.every:
            kept |= {step for step in published if step % self.every == 0}
        sign = 1 if self.mode == "max" else -1
        rated = [(sign * metrics[self.best], step) for step, metrics in published.items() if self.best in metrics]
        return kept | {max(rated)[1]} if rated else kept


def accuracy_on(dataset: str) -> str:
    """Returns the name of an evaluation set's accuracy among a checkpoint's metrics."""
    return f"accuracy on {dataset}"


class Means:
    """Running means of the metrics over the steps since the previous checkpoint."""

    def __init__(self) -> None:
        self._steps: list[Mapping[str, float]] = []

    def add(self, metrics: Mapping[str, float]) -> None:
        """Adds a step's metrics."""
        self._steps.append(metrics)

    def take(self) -> dict[str, float]:
        """Returns the mean of each metric that all these steps have, and starts new sums."""
        steps, self._steps = self._steps, []
        names = set.intersection(*(set(metrics) for metrics in steps)) if steps else set()
        return {name: sum(metrics[name] for metrics in steps) / len(steps) for name in sorted(names)}
