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
    """Responses over which counts and denominators are taken."""
    computed: Integers
    """Trained responses that are in a pass."""
    passes: list[list[Rows]]
    """Forward passes of each rank, the same number on every rank."""


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
    """Sampled tokens that are trained on, over all ranks; at least 1."""
    num_sequences: int
    """Responses that are trained on, over all ranks; at least 1."""
    num_computed: int
    """Sampled tokens in the passes of all ranks."""
    num_computed_with_context: int
    """Computed tokens plus given tokens and prompt tokens, the prompt counted once per response even if shared."""
    expert_counts: Tensor | None = None
    """Tokens of all ranks that the policy routes to each expert before the step's updates; None if the load is not
    balanced. [layers, experts]"""

    @property
    def largest_pass(self) -> int:
        """Tokens of this rank's largest pass, padding included."""
        return max((batch.input_ids.numel() for batch in self.passes), default=0)


def plan_step(
    rollouts: StepRollouts,
    training: Training,
    *,
    packed: bool = False,
    signal: Bools | None = None,
    attention: float = 0.0,
) -> StepPlan:
    """Plans minibatches in the order of the prompts, and deals each to the ranks in passes. All forwards use these
    passes.

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
    """Returns each rank's passes. With nothing to train on there is one pass that does not count: an update needs a
    backward.

    Among ranks that share their rows, the first has the passes, and the others have as many that do not count.
    """
    shared = training.sequence_parallel_size
    passes = _passes_of_groups(rollouts, part, training, ranks.world_size() // shared, packed, attention)
    helpers = [IDLE] * len(passes[0])
    return [of_rank for of_first in passes for of_rank in (of_first, *[helpers] * (shared - 1))]


def _passes_of_groups(
    rollouts: StepRollouts, part: list[int], training: Training, size: int, packed: bool, attention: float
) -> list[list[Rows]]:
    """Returns the passes of `size` ranks that share no row."""
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
