"""Cuts a step's rollouts into the minibatches of its optimizer updates, and deals these to the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rpg.batches.batch import Bools, Microbatch, StepRollouts, microbatch
from rpg.batches.packing_plan import IDLE, Integers, Rows, plan_packed, plan_padded
from rpg.processes import ranks
from specs.schema.training import Training


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The responses of one optimizer update, and each rank's passes over its share of them."""

    trained: Integers
    """Responses that counts and denominators include."""
    computed: Integers
    """Trained responses that are in a pass."""
    passes: list[list[Rows]]
    """Forward passes of each rank. All ranks have the same number of passes."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The updates of a step. It depends only on data that every rank has, so the ranks agree without communication."""

    updates: list[UpdatePlan]
    packed: bool
    """Whether a pass is one row without padding."""

    def trainers(self, count: int) -> Integers:
        """Returns the rank that trains on each of the step's `count` responses; -1 if no rank does. [count]"""
        trainers = np.full(count, -1, dtype=np.int64)
        for update in self.updates:
            for rank, passes in enumerate(update.passes):
                for rows in passes:
                    trainers[list(rows.rollouts)] = rank
        return trainers


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The responses of one optimizer update, and this rank's passes over its share of them."""

    passes: list[Microbatch]
    num_tokens: int
    """Number of sampled tokens that are trained on, over all ranks; at least 1."""
    num_sequences: int
    """Number of responses that are trained on, over all ranks; at least 1."""
    num_computed: int
    """Number of sampled tokens in the passes of all ranks."""
    num_computed_with_context: int
    """Number of computed tokens plus given tokens and prompt tokens. A prompt counts once per response even if it is
    shared."""
    expert_counts: Tensor | None = None
    """Number of tokens, over all ranks, that the policy routes to each expert before the step's updates; None if the
    load is not balanced. [layers, experts]"""

    @property
    def largest_pass(self) -> int:
        """Returns the number of tokens in this rank's largest pass, including padding."""
        return max((batch.input_ids.numel() for batch in self.passes), default=0)


def plan_step(
    rollouts: StepRollouts,
    training: Training,
    *,
    packed: bool = False,
    signal: Bools | None = None,
    attention: float = 0.0,
) -> StepPlan:
    """Plans minibatches in the order of the prompts, and distributes the passes of each over the ranks. All forward
    passes of the step use this plan.

    Responses that `mask_truncated` excludes are in no pass and no count.

    Args:
        packed: whether a pass is one row without padding, see Learner.packs.
        signal: whether each response has a nonzero advantage. Responses without one count, but are in no pass. A
            minibatch without any signal computes its shortest response, so that it has metrics. [B]
        attention: cost of attention, used to give the ranks equal work, see `Learner.attention_share`.
    """
    parts = np.array_split(np.arange(len(rollouts.lengths)), training.minibatches)
    if training.mask_truncated:
        parts = [part[~rollouts.truncated[part]] for part in parts]
    computed = parts if signal is None else [_with_signal(rollouts, part, signal) for part in parts]
    passes = [_passes(rollouts, chosen.tolist(), training, packed, attention) for chosen in computed]
    return StepPlan([UpdatePlan(*each) for each in zip(parts, computed, passes, strict=True)], packed)


def cut(rollouts: StepRollouts, plan: StepPlan, device: torch.device) -> list[Minibatch]:
    """Returns the planned minibatches with this rank's passes. The rank must hold the responses in them."""
    return [
        Minibatch(
            passes=[microbatch(rollouts, rows, device, packed=plan.packed) for rows in update.passes[ranks.rank()]],
            num_tokens=max(1, int(rollouts.num_sampled[update.trained].sum())),
            num_sequences=max(1, len(update.trained)),
            num_computed=int(rollouts.num_sampled[update.computed].sum()),
            num_computed_with_context=int(rollouts.sequence_lengths[update.computed].sum()),
        )
        for update in plan.updates
    ]


def trained_fraction(minibatches: Sequence[Minibatch], rollouts: StepRollouts) -> dict[str, float]:
    """Returns the share of the sampled tokens that are computed."""
    computed = sum(minibatch.num_computed for minibatch in minibatches)
    return {"trained_fraction": computed / int(rollouts.num_sampled.sum())}


def _with_signal(rollouts: StepRollouts, part: Integers, signal: Bools) -> Integers:
    chosen = part[signal[part]]
    if len(chosen) or not len(part):
        return chosen
    return part[[int(rollouts.sequence_lengths[part].argmin())]]


def _passes(
    rollouts: StepRollouts, part: list[int], training: Training, packed: bool, attention: float
) -> list[list[Rows]]:
    """Returns each rank's passes. If there is nothing to train on, there is one pass that does not count, because an
    update needs a backward pass.

    Among ranks that share their rows, the first has the passes, and the others have as many that do not count.
    """
    shared = training.sequence_parallel_size
    passes = _passes_of_groups(rollouts, part, training, ranks.world_size() // shared, packed, attention)
    helpers = [IDLE] * len(passes[0])
    return [of_rank for of_first in passes for of_rank in (of_first, *[helpers] * (shared - 1))]


def _passes_of_groups(
    rollouts: StepRollouts, part: list[int], training: Training, size: int, packed: bool, attention: float
) -> list[list[Rows]]:
    """Returns the passes of `size` ranks that do not share rows."""
    if not part:
        return [[IDLE]] * size
    if not packed:
        rows, widths = rollouts.padded_rows()
        return plan_padded(
            widths, part, rows=rows, ranks=size, max_tokens=training.microbatch_tokens, attention=attention
        )
    return plan_packed(
        rollouts.prompt_lengths,
        rollouts.lengths,
        rollouts.group_ids,
        part,
        ranks=size,
        max_tokens=training.microbatch_tokens,
        attention=attention,
    )
