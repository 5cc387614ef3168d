"""Batches of rollouts that are sampled and not yet trained on, in memory and as a part of a checkpoint."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpg.batch import StepRollouts
from rpg.pieces import load_values
from rpg.rewards.score import Score

WAITING = "rollouts"
"""Stem of their file in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The batch of a step to come."""

    step: int
    rollouts: StepRollouts
    position: int
    """Problems taken since the run began, this batch's included."""
    sampling_seconds: float = 0.0
    """What sampling it took on this rank."""


def plain_waiting(batches: Sequence[Waiting]) -> list[dict[str, Any]]:
    """Batches as tensors and plain values, for a checkpoint."""
    return [{"step": batch.step, "position": batch.position, "rollouts": _plain(batch.rollouts)} for batch in batches]


def load_waiting(directory: Path) -> list[Waiting]:
    """Those that rank 0 gave to a checkpoint's copy under WAITING; none where it gave none."""
    return [
        Waiting(record["step"], _rollouts(record["rollouts"]), position=record["position"])
        for record in load_values(directory, WAITING, rank=0) or []
    ]


def _plain(rollouts: StepRollouts) -> dict[str, Any]:
    """The fields as tensors and plain values, which loading can check."""
    values = {field.name: getattr(rollouts, field.name) for field in fields(rollouts)}
    return {
        **{name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in values.items()},
        "prompts": [torch.from_numpy(prompt) for prompt in rollouts.prompts],
        "scores": [asdict(score) for score in rollouts.scores],
    }


def _rollouts(plain: dict[str, Any]) -> StepRollouts:
    values: dict[str, Any] = {
        name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in plain.items()
    }
    values["prompts"] = tuple(prompt.numpy() for prompt in plain["prompts"])
    values["scores"] = tuple(Score(**score) for score in plain["scores"])
    return StepRollouts(**values)
