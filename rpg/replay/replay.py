"""Recorded rollouts under another objective: its loss and its gradient weights, without a model and without sampling.

What a gradient follows from is on record: of each token the logprobs of the policy at its last update, of the policy
that sampled and of the reference, and the entropy, of each response the reward, its group and whether it was cut. The
objective that was trained with gives back the recorded ratios, clips and losses; another one says what it would have
done with the same rollouts. It is a first step taken elsewhere, no second run: later steps would have sampled other
responses.

Of the entropy bonus the value alone is on record: its gradient follows from the whole distribution of each token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rpg.advantages import response_means, token_advantages
from rpg.batches.packing_plan import Rows, plan_padded
from rpg.objectives import TokenBatch, evaluate
from rpg.objectives.aggregate import aggregate
from rpg.objectives.correction import correction_weight, rollout_ratio
from specs.schema.experiment import Experiment
from specs.schema.training import Training

BLOCK_TOKENS = 2**18
"""Tokens, padding included, that are worked on at once; about 100 bytes each."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step as recorded. B responses in their order, their N sampled tokens laid end to end."""

    step: int
    rewards: npt.NDArray[np.float32]
    """[B]"""
    group_ids: npt.NDArray[np.int64]
    """[B]"""
    lengths: npt.NDArray[np.int64]
    """Sampled tokens of each response. [B]"""
    truncated: npt.NDArray[np.bool_]
    """Whether a response was cut at the maximum length. [B]"""
    token_ids: npt.NDArray[np.int64]
    """[N]"""
    positions: npt.NDArray[np.int64]
    """Where each stands in its response, given tokens counted. [N]"""
    logprobs: npt.NDArray[np.float32]
    """Of the policy at the update that last trained on the token, nats; NaN where none did. [N]"""
    old_logprobs: npt.NDArray[np.float32]
    """[N]"""
    ref_logprobs: npt.NDArray[np.float32]
    """[N]"""
    rollout_logprobs: npt.NDArray[np.float32]
    """[N]"""
    entropies: npt.NDArray[np.float32]
    """At the same update as `logprobs`, nats. [N]"""


@dataclass(frozen=True, slots=True)
class Weights:
    """What an objective makes of a step's tokens. [N] each, 0 or False where a token was not trained on."""

    advantages: Tensor
    losses: Tensor
    """Of each token, corrected and with its bonus, before the aggregation."""
    weight: Tensor
    """m: minus the derivative of the objective's token losses by log pi."""
    correction: Tensor
    """What `rollout.correction` multiplies a token's loss by."""
    gradient: Tensor
    """m times the correction and what the aggregation gives the token; without the bonus."""
    bonus: Tensor
    """The entropy bonus's part of the token losses."""
    penalty: Tensor
    """The divergence's part of the token losses."""
    penalty_weight: Tensor
    """The divergence's part of the weight."""
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor
    kl_reverse: Tensor
    kl_forward: Tensor
    kl_behaviour: Tensor
    share: Tensor
    """What the aggregation multiplies a token's loss by."""
    known: Tensor
    """Whether the token was trained on, so that all of its logprobs are recorded."""

    @property
    def clipped(self) -> Tensor:
        """Whether any side of the clip acts."""
        return self.clipped_low | self.clipped_high | self.clipped_dual


_TRAINED = ("logprobs", "old_logprobs", "ref_logprobs")
"""Columns that are NaN where a token was not trained on."""


def replay(recorded: RecordedStep, experiment: Experiment) -> Weights:
    """A recorded step under an experiment's objective, advantage, correction, minibatches and aggregation.

    Ratios, weights and clips are taken in float32, as in training.

    Raises:
        ValueError: as `token_advantages`.
    """
    columns = {name: torch.from_numpy(getattr(recorded, name)) for name in _TRAINED}
    known = torch.stack([values.isfinite() for values in columns.values()]).all(0)
    columns |= {name: torch.from_numpy(getattr(recorded, name)) for name in ("rollout_logprobs", "entropies")}
    columns["advantages"] = advantages_of(recorded, experiment)
    found = {
        entry.name: torch.zeros(len(known), dtype=torch.bool if "clipped" in entry.name else torch.float32)
        for entry in fields(Weights)
        if entry.name not in ("known", "advantages")
    }
    for block in _blocks(recorded, experiment.training):
        for name, values in _weigh(block, columns, known, experiment).items():
            found[name][block.tokens] = values
    return Weights(known=known, advantages=columns["advantages"], **found)


def advantages_of(recorded: RecordedStep, experiment: Experiment) -> Tensor:
    """Of every response token, from the recorded rewards. [N], float32"""
    old_logprobs = ref_logprobs = None
    if experiment.objective.penalizes_reward:  # a token that was not trained on has no penalty on record
        old_logprobs = torch.from_numpy(recorded.old_logprobs).nan_to_num(0.0)
        ref_logprobs = torch.from_numpy(recorded.ref_logprobs).nan_to_num(0.0)
    return token_advantages(
        experiment.objective,
        experiment.advantage,
        rewards=torch.from_numpy(recorded.rewards),
        group_ids=torch.from_numpy(recorded.group_ids),
        lengths=torch.from_numpy(recorded.lengths),
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
    )


def response_advantages(recorded: RecordedStep, weights: Weights) -> Tensor:
    """Of every response, as the table `rollouts` has them. [B]"""
    return response_means(weights.advantages, torch.from_numpy(recorded.lengths))


@dataclass(frozen=True, slots=True)
class _Block:
    """Some responses of one update, b x T."""

    tokens: Tensor
    """Where their n tokens stand among the step's. [n]"""
    places: Tensor
    """Where they stand in the flattened [b * T]. [n]"""
    shape: tuple[int, int]
    num_tokens: int
    """Of the whole update."""
    num_sequences: int
    """Of the whole update."""

    def spread(self, values: Tensor) -> Tensor:
        """[N] -> [b, T], 0 elsewhere."""
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy(0, self.places, values[self.tokens]).view(self.shape)

    def pick(self, values: Tensor) -> Tensor:
        """[b, T] -> [n]."""
        return values.detach().flatten()[self.places]


def _blocks(recorded: RecordedStep, training: Training) -> Iterator[_Block]:
    """The step's updates, as the trainer cuts them, in pieces that fit memory."""
    starts = np.cumsum(recorded.lengths) - recorded.lengths
    for part in np.array_split(np.arange(len(recorded.lengths)), training.minibatches):
        if training.mask_truncated:
            part = part[~recorded.truncated[part]]
        if not len(part):
            continue
        for rows in plan_padded(recorded.lengths, part.tolist(), ranks=1, rank=0, max_tokens=BLOCK_TOKENS):
            yield _block(recorded.lengths, starts, rows, part)


def _block(
    lengths: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], rows: Rows, part: npt.NDArray[np.int64]
) -> _Block:
    index = np.array(rows.rollouts, dtype=np.int64)
    mine = lengths[index]
    longest = max(int(mine.max()), 1)
    row = np.repeat(np.arange(len(index)), mine)
    column = np.arange(mine.sum()) - np.repeat(np.cumsum(mine) - mine, mine)
    return _Block(
        tokens=torch.from_numpy(np.repeat(starts[index], mine) + column),
        places=torch.from_numpy(row * longest + column),
        shape=(len(index), longest),
        num_tokens=int(lengths[part].sum()),
        num_sequences=len(part),
    )


def _weigh(block: _Block, columns: dict[str, Tensor], known: Tensor, experiment: Experiment) -> dict[str, Tensor]:
    """The fields of `Weights` for a block's tokens, [n] each."""
    objective = experiment.objective
    inputs = {name: block.spread(columns[name]) for name in (*_TRAINED, "advantages")}
    tokens = TokenBatch(**inputs, response_mask=block.spread(known.float()))
    mask = tokens.response_mask != 0
    present = block.spread(torch.ones_like(known, dtype=torch.float32))
    evaluation, without = evaluate(objective, tokens), evaluate(objective.model_copy(update={"kl_coef": 0.0}), tokens)
    seen = evaluation.diagnostics()
    gap = rollout_ratio(tokens.old_logprobs, block.spread(columns["rollout_logprobs"]), tokens.response_mask)
    seen["correction"] = correction_weight(experiment.rollout.correction, gap)
    entropies = torch.where(mask, block.spread(columns["entropies"]), 0.0)
    seen["bonus"] = -experiment.training.entropy_coef * entropies
    losses = torch.where(mask, evaluation.losses, 0.0) * seen["correction"]
    seen["losses"] = losses + seen["bonus"]
    seen["penalty"] = losses - torch.where(mask, without.losses, 0.0) * seen["correction"]
    seen["penalty_weight"] = evaluation.weight - without.weight
    # The aggregation is linear in the token losses: its derivative is what each of them is multiplied by.
    leaf = torch.zeros(block.shape, requires_grad=True)
    total = aggregate(
        leaf,
        present,
        aggregation=objective.aggregation,
        num_tokens=block.num_tokens,
        num_sequences=block.num_sequences,
        max_response_length=experiment.rollout.max_response_length,
    )
    (seen["share"],) = torch.autograd.grad(total, leaf)
    seen["gradient"] = seen["weight"] * seen["correction"] * seen["share"]
    return {name: block.pick(values) for name, values in seen.items()}
