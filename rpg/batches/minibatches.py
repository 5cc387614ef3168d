"""A step's rollouts cut into the minibatches of its optimizer updates."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rpg.advantages import with_signal
from rpg.batches.batch import Bools, Microbatch, StepRollouts, microbatch
from rpg.batches.packing_plan import Integers, Rows, plan_packed, plan_padded
from rpg.processes import ranks
from specs.schema.training import Training


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The responses of one optimizer update, and this rank's passes over its share of them."""

    passes: list[Microbatch]
    num_tokens: int
    """Sampled tokens that are trained on, over all ranks; at least 1."""
    num_sequences: int
    """Responses that are trained on, over all ranks; at least 1."""
    num_computed: int
    """Sampled tokens in the passes of all ranks."""
    num_computed_with_context: int
    """The same with the given tokens and those of each response's prompt, though responses may share it."""

    @property
    def largest_pass(self) -> int:
        """Tokens of this rank's largest pass, padding included."""
        return max((batch.input_ids.numel() for batch in self.passes), default=0)


def cut(
    rollouts: StepRollouts,
    training: Training,
    device: torch.device,
    *,
    packed: bool = False,
    advantage: Tensor | None = None,
) -> list[Minibatch]:
    """Minibatches in the order of the prompts, each with this rank's passes, which serve every forward alike.

    Responses that `mask_truncated` leaves out are in no pass and no count.

    Args:
        packed: whether a pass is one row without padding, see Learner.packs.
        advantage: of every sampled token, to leave out the responses in which it is 0 throughout: they count, and are
            in no pass. Of a minibatch without others the shortest is computed, for figures to be taken from. [M]
    """
    parts = np.array_split(np.arange(len(rollouts.lengths)), training.minibatches)
    if training.mask_truncated:
        parts = [part[~rollouts.truncated[part]] for part in parts]
    computed = parts
    if advantage is not None:
        signal = with_signal(advantage, torch.from_numpy(rollouts.num_sampled)).numpy()
        computed = [_with_signal(rollouts, part, signal) for part in parts]
    return [
        Minibatch(
            passes=[
                microbatch(rollouts, rows, device, packed=packed)
                for rows in _passes(rollouts, chosen.tolist(), training, packed=packed)
            ],
            num_tokens=max(1, int(rollouts.num_sampled[part].sum())),
            num_sequences=max(1, len(part)),
            num_computed=int(rollouts.num_sampled[chosen].sum()),
            num_computed_with_context=int(rollouts.sequence_lengths[chosen].sum()),
        )
        for part, chosen in zip(parts, computed, strict=True)
    ]


def trained_fraction(minibatches: Sequence[Minibatch], rollouts: StepRollouts) -> dict[str, float]:
    """The share of the sampled tokens that are computed."""
    computed = sum(minibatch.num_computed for minibatch in minibatches)
    return {"trained_fraction": computed / len(rollouts.rollout_logprobs)}


def _with_signal(rollouts: StepRollouts, part: Integers, signal: Bools) -> Integers:
    chosen = part[signal[part]]
    if len(chosen) or not len(part):
        return chosen
    return part[[int(rollouts.sequence_lengths[part].argmin())]]


def _passes(rollouts: StepRollouts, part: list[int], training: Training, *, packed: bool) -> list[Rows]:
    """This rank's; one that does not count where there is nothing to train on, since an update needs a backward."""
    if not part:
        return [Rows((int(rollouts.sequence_lengths.argmin()),), counts=False)]
    share = {"ranks": ranks.world_size(), "rank": ranks.rank(), "max_tokens": training.microbatch_tokens}
    if not packed:
        return plan_padded(rollouts.sequence_lengths, part, **share)
    return plan_packed(rollouts.prompt_lengths, rollouts.lengths, rollouts.group_ids, part, **share)
