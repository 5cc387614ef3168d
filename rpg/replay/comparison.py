"""Compares two objectives on the same recorded tokens: how well their gradients agree, and on which tokens they differ
most."""

import heapq
from dataclasses import dataclass, field
from typing import Any

import torch

from rpg.replay.step import RecordedStep, ReplayedStep


@dataclass(slots=True)
class GradientComparison:
    """The sums over tokens and steps that compare the gradients of the recorded objective and of another one."""

    dot: float = 0.0
    recorded_squared: float = 0.0
    other_squared: float = 0.0
    tokens: float = 0.0
    flipped: float = 0.0
    zeroed: float = 0.0
    activated: float = 0.0

    def add(self, recorded: ReplayedStep, other: ReplayedStep) -> None:
        """Adds a step under both objectives."""
        first, second = recorded.gradient[recorded.trained].double(), other.gradient[recorded.trained].double()
        self.dot += float((first * second).sum())
        self.recorded_squared += float(first.square().sum())
        self.other_squared += float(second.square().sum())
        self.tokens += float(recorded.trained.sum())
        self.flipped += float((first * second < 0).sum())
        self.zeroed += float(((first != 0) & (second == 0)).sum())
        self.activated += float(((first == 0) & (second != 0)).sum())

    def metrics(self) -> dict[str, float | None]:
        """Returns a comparison of both vectors of gradient weights, one entry per token, correction and aggregation
        included:

        cosine: cosine of the angle between them; None if one of them is 0. length: the other's over the recorded one's.
        flipped, zeroed, activated: the share of the tokens whose weight changes sign, becomes 0, or was 0.
        """
        product = (self.recorded_squared * self.other_squared) ** 0.5
        tokens = self.tokens or 1.0
        return {
            "cosine": self.dot / product if product else None,
            "length": (self.other_squared / self.recorded_squared) ** 0.5 if self.recorded_squared else None,
            "flipped": self.flipped / tokens,
            "zeroed": self.zeroed / tokens,
            "activated": self.activated / tokens,
        }


@dataclass(slots=True)
class LargestDifferences:
    """The tokens on which two objectives differ most. The gradient of each objective on a step is first scaled to
    length 1."""

    most: int = 10
    _heap: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)
    _seen: int = 0

    def add(self, step: RecordedStep, recorded: ReplayedStep, other: ReplayedStep) -> None:
        """Adds a step under both objectives."""
        apart = (_unit(other.gradient) - _unit(recorded.gradient)).abs()
        if not len(apart):
            return
        lengths = step.rollouts.num_sampled
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.from_numpy(lengths))
        for difference, index in zip(*(top.tolist() for top in apart.topk(min(self.most, len(apart)))), strict=True):
            if difference == 0:
                break
            token = {
                "step": step.step,
                "rollout_id": int(owner[index]),
                "position": int(step.positions[index]),
                "token_id": int(step.rollouts.token_ids[index]),
                "advantage": float(recorded.advantages[index]),
                "ratio": float(recorded.ratio[index]),
                "clipped": bool(recorded.clipped[index]),
                "weight": float(recorded.weight[index]),
                "replayed_advantage": float(other.advantages[index]),
                "replayed_ratio": float(other.ratio[index]),
                "replayed_clipped": bool(other.clipped[index]),
                "replayed_weight": float(other.weight[index]),
                "apart": difference,
            }
            self._seen += 1
            heapq.heappush(self._heap, (difference, -self._seen, token))
            if len(self._heap) > self.most:
                heapq.heappop(self._heap)

    def tokens(self) -> list[dict[str, Any]]:
        """Returns the tokens, largest difference first."""
        return [token for _, _, token in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]


def _unit(vector: torch.Tensor) -> torch.Tensor:
    length = float(vector.double().norm())
    return vector.double() / length if length else vector.double()
