"""Two objectives on the same recorded tokens: how far their gradients point the same way, and where they do not."""

import heapq
from dataclasses import dataclass, field
from typing import Any

import torch

from rpg.replay.replay import RecordedStep, Weights


@dataclass(slots=True)
class GradientComparison:
    """Sums over tokens and steps of what two objectives give the same tokens; `one` was recorded, `other` replayed."""

    dot: float = 0.0
    one_squared: float = 0.0
    other_squared: float = 0.0
    tokens: float = 0.0
    flipped: float = 0.0
    zeroed: float = 0.0
    activated: float = 0.0

    def add(self, one: Weights, other: Weights) -> None:
        """One step."""
        first, second = one.gradient[one.known].double(), other.gradient[one.known].double()
        self.dot += float((first * second).sum())
        self.one_squared += float(first.square().sum())
        self.other_squared += float(second.square().sum())
        self.tokens += float(one.known.sum())
        self.flipped += float((first * second < 0).sum())
        self.zeroed += float(((first != 0) & (second == 0)).sum())
        self.activated += float(((first == 0) & (second != 0)).sum())

    def figures(self) -> dict[str, float | None]:
        """cosine: of the two vectors of gradient weights, one entry a token, aggregation included; None where one of
        them is 0. length: the replayed vector's over the recorded one's. flipped, zeroed, activated: shares of the
        tokens whose weight changes sign, becomes 0, or was 0."""
        product = (self.one_squared * self.other_squared) ** 0.5
        tokens = self.tokens or 1.0
        return {
            "cosine": self.dot / product if product else None,
            "length": (self.other_squared / self.one_squared) ** 0.5 if self.one_squared else None,
            "flipped": self.flipped / tokens,
            "zeroed": self.zeroed / tokens,
            "activated": self.activated / tokens,
        }


@dataclass(slots=True)
class Furthest:
    """The tokens on which two objectives differ most: by their share of each step's gradient, both scaled to length
    1."""

    most: int = 10
    _heap: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)
    _seen: int = 0

    def add(self, recorded: RecordedStep, one: Weights, other: Weights) -> None:
        """One step."""
        apart = (_unit(other.gradient) - _unit(one.gradient)).abs()
        if not len(apart):
            return
        owner = torch.repeat_interleave(torch.arange(len(recorded.lengths)), torch.from_numpy(recorded.lengths))
        for difference, index in zip(*(top.tolist() for top in apart.topk(min(self.most, len(apart)))), strict=True):
            if difference == 0:
                break
            token = {
                "step": recorded.step,
                "rollout_id": int(owner[index]),
                "position": int(recorded.positions[index]),
                "token_id": int(recorded.token_ids[index]),
                "advantage": float(one.advantages[index]),
                "ratio": float(one.ratio[index]),
                "clipped": bool(one.clipped[index]),
                "weight": float(one.weight[index]),
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
        """Furthest apart first."""
        return [token for _, _, token in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]


def _unit(vector: torch.Tensor) -> torch.Tensor:
    length = float(vector.double().norm())
    return vector.double() / length if length else vector.double()
