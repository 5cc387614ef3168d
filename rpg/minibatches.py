"""A step's rollouts cut into the minibatches of its optimizer updates."""

from dataclasses import dataclass

import numpy as np
import torch

from rpg import ranks
from rpg.batch import Microbatch, StepRollouts, microbatch, plan_microbatches
from specs.schema.training import Training


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The responses of one optimizer update, and this rank's passes over its share of them."""

    passes: list[Microbatch]
    num_tokens: int
    """Response tokens, over all ranks."""
    num_sequences: int
    """Responses, over all ranks."""


def cut(rollouts: StepRollouts, training: Training, device: torch.device) -> list[Minibatch]:
    """Minibatches in the order of the prompts, each with this rank's passes, which serve every forward alike."""
    lengths = rollouts.sequence_lengths
    parts = np.array_split(np.arange(len(rollouts.lengths)), training.minibatches)
    return [
        Minibatch(
            passes=[
                microbatch(rollouts, rows, device)
                for rows in plan_microbatches(
                    lengths,
                    part.tolist(),
                    ranks=ranks.world_size(),
                    rank=ranks.rank(),
                    max_tokens=training.microbatch_tokens,
                )
            ],
            num_tokens=int(rollouts.lengths[part].sum()),
            num_sequences=len(part),
        )
        for part in parts
    ]
