"""A step's rollouts cut into the minibatches of its optimizer updates."""

from dataclasses import dataclass

import numpy as np
import torch

from rpg import ranks
from rpg.batch import Microbatch, Rows, StepRollouts, microbatch, plan_microbatches
from specs.schema.training import Training


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The responses of one optimizer update, and this rank's passes over its share of them."""

    passes: list[Microbatch]
    num_tokens: int
    """Response tokens that are trained on, over all ranks; at least 1."""
    num_sequences: int
    """Responses that are trained on, over all ranks; at least 1."""


def cut(rollouts: StepRollouts, training: Training, device: torch.device, *, packed: bool = False) -> list[Minibatch]:
    """Minibatches in the order of the prompts, each with this rank's passes, which serve every forward alike.

    packed: whether a pass is one row without padding, see Learner.packs.

    Responses that `mask_truncated` leaves out are in no pass and no count.
    """
    parts = np.array_split(np.arange(len(rollouts.lengths)), training.minibatches)
    if training.mask_truncated:
        parts = [part[~rollouts.truncated[part]] for part in parts]
    return [
        Minibatch(
            passes=[
                microbatch(rollouts, rows, device, packed=packed)
                for rows in _passes(rollouts, part.tolist(), training, packed=packed)
            ],
            num_tokens=max(1, int(rollouts.lengths[part].sum())),
            num_sequences=max(1, len(part)),
        )
        for part in parts
    ]


def _passes(rollouts: StepRollouts, part: list[int], training: Training, *, packed: bool) -> list[Rows]:
    """This rank's; one that does not count where there is nothing to train on, since an update needs a backward."""
    if not part:
        return [Rows((int(rollouts.sequence_lengths.argmin()),), counts=False)]
    return plan_microbatches(
        rollouts.sequence_lengths,
        part,
        ranks=ranks.world_size(),
        rank=ranks.rank(),
        max_tokens=training.microbatch_tokens,
        packed=packed,
    )
