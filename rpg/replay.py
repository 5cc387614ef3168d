"""Recorded rollouts under another objective: its loss and its gradient weights, without a model and without sampling.

What a gradient follows from is on record: of each token the logprobs of the policy at its last update, of the policy
that sampled and of the reference, of each response the reward and its group. The objective that was trained with gives
back the recorded ratios and clips; another one says what it would have done with the same rollouts. It is a first step
taken elsewhere, no second run: later steps would have sampled other responses.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rpg.advantages import needs_logprobs, response_means, token_advantages
from rpg.batch import Rows, plan_microbatches
from rpg.objectives import diagnostics, token_losses
from rpg.objectives.aggregate import aggregate
from specs.schema.experiment import Experiment
from specs.schema.objective import Objective

BLOCK_TOKENS = 2**18
"""Tokens, padding included, that are worked on at once; about 100 bytes each."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step as recorded. B responses in their order, their N tokens laid end to end."""

    step: int
    rewards: npt.NDArray[np.float32]
    """[B]"""
    group_ids: npt.NDArray[np.int64]
    """[B]"""
    lengths: npt.NDArray[np.int64]
    """Tokens of each response. [B]"""
    token_ids: npt.NDArray[np.int64]
    """[N]"""
    logprobs: npt.NDArray[np.float32]
    """Of the policy at the update that last trained on the token, nats; NaN where none did. [N]"""
    old_logprobs: npt.NDArray[np.float32]
    """[N]"""
    ref_logprobs: npt.NDArray[np.float32]
    """[N]"""


@dataclass(frozen=True, slots=True)
class Weights:
    """What an objective makes of a step's tokens. [N] each, 0 or False where a token was not trained on."""

    advantages: Tensor
    losses: Tensor
    """Of each token, before the aggregation."""
    weight: Tensor
    """m: minus the derivative of the token losses by log pi."""
    gradient: Tensor
    """The same of the update's loss: m times what the aggregation gives the token."""
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


def replay(recorded: RecordedStep, experiment: Experiment) -> Weights:
    """A recorded step under an experiment's objective, advantage, minibatches and aggregation.

    Ratios, weights and clips are taken in float32, as in training.

    Raises:
        ValueError: as `token_advantages`.
    """
    columns = {name: torch.from_numpy(getattr(recorded, name)) for name in ("logprobs", "old_logprobs", "ref_logprobs")}
    known = torch.stack([values.isfinite() for values in columns.values()]).all(0)
    columns["advantages"] = advantages_of(recorded, experiment)
    found = {
        entry.name: torch.zeros(len(known), dtype=torch.bool if "clipped" in entry.name else torch.float32)
        for entry in fields(Weights)
        if entry.name not in ("known", "advantages")
    }
    for block in _blocks(recorded, experiment.training.minibatches):
        for name, values in _weigh(block, columns, known, experiment).items():
            found[name][block.tokens] = values
    return Weights(known=known, advantages=columns["advantages"], **found)


def advantages_of(recorded: RecordedStep, experiment: Experiment) -> Tensor:
    """Of every response token, from the recorded rewards. [N], float32"""
    old_logprobs = ref_logprobs = None
    if needs_logprobs(experiment.objective):  # a token that was not trained on has no penalty on record
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


def _blocks(recorded: RecordedStep, minibatches: int) -> Iterator[_Block]:
    """The step's updates, as the trainer cuts them, in pieces that fit memory."""
    starts = np.cumsum(recorded.lengths) - recorded.lengths
    for part in np.array_split(np.arange(len(recorded.lengths)), minibatches):
        if not len(part):
            continue
        for rows in plan_microbatches(recorded.lengths, part.tolist(), ranks=1, rank=0, max_tokens=BLOCK_TOKENS):
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
    inputs = {name: block.spread(values) for name, values in columns.items()}
    inputs["response_mask"] = block.spread(known.float())
    present = block.spread(torch.ones_like(known, dtype=torch.float32))
    seen = {**diagnostics(objective, **inputs), "losses": _losses(objective, inputs)}
    without = objective.model_copy(update={"kl_coef": 0.0})
    seen["penalty"] = seen["losses"] - _losses(without, inputs)
    seen["penalty_weight"] = seen["weight"] - diagnostics(without, **inputs)["weight"]
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
    seen["gradient"] = seen["weight"] * seen["share"]
    return {name: block.pick(values) for name, values in seen.items()}


def _losses(objective: Objective, inputs: dict[str, Tensor]) -> Tensor:
    return torch.where(inputs["response_mask"] != 0, token_losses(objective, **inputs), 0.0)


@dataclass(slots=True)
class Tally:
    """Sums of one objective's figures over tokens and steps, which add up exactly."""

    updates: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    largest_ratio: float = 0.0

    def add(self, weights: Weights, updates: int) -> None:
        """One step, of this many updates."""
        self.updates += updates
        tokens = weights.known
        wide = {
            name: getattr(weights, name)[tokens].double()
            for name in (*_TOKEN_MEANS.values(), "weight", "gradient", "penalty_weight")
        }
        self._add("tokens", float(tokens.sum()))
        self._add("loss", float((weights.losses.double() * weights.share).sum()))
        self._add("penalty", float((weights.penalty.double() * weights.share).sum()))
        for name, values in wide.items():
            self._add(name, float(values.sum()))
        for name in ("ratio", "weight", "gradient", "penalty_weight"):
            self._add(f"{name}_squared", float(wide[name].square().sum()))
        self._add("weight_size", float(wide["weight"].abs().sum()))
        if len(wide["ratio"]):
            self.largest_ratio = max(self.largest_ratio, float(wide["ratio"].max()))

    def figures(self) -> dict[str, float]:
        """By the names that SQL knows, and those of `FIGURES`. Empty where no token was trained on."""
        sums, tokens = self.sums, self.sums.get("tokens", 0.0)
        if not tokens:
            return {}
        return {
            "loss": sums["loss"] / self.updates,
            "loss/divergence": sums["penalty"] / self.updates,
            "weight/mean": sums["weight"] / tokens,
            "weight/variance": max(0.0, sums["weight_squared"] / tokens - (sums["weight"] / tokens) ** 2),
            "weight/ess": _share(sums["weight_size"] ** 2, tokens * sums["weight_squared"]),
            "weight/divergence": _share(sums["penalty_weight_squared"], sums["weight_squared"]) ** 0.5,
            "ratio/mean": sums["ratio"] / tokens,
            "ratio/max": self.largest_ratio,
            "ratio/ess": _share(sums["ratio"] ** 2, tokens * sums["ratio_squared"]),
            **{metric: sums[name] / tokens for metric, name in _TOKEN_MEANS.items() if metric != "ratio/mean"},
        }

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value


_TOKEN_MEANS = {
    "ratio/mean": "ratio",
    "clip_fraction/low": "clipped_low",
    "clip_fraction/high": "clipped_high",
    "clip_fraction/dual": "clipped_dual",
    "kl/reverse": "kl_reverse",
    "kl/forward": "kl_forward",
    "kl/behaviour": "kl_behaviour",
}
FIGURES = {
    "loss": "of an update, mean over the step's updates",
    "loss/divergence": "the divergence's part of it",
    "weight/mean": "gradient weight m of a token, before the aggregation",
    "weight/variance": "of m over the tokens",
    "weight/ess": "share of the tokens that |m| is spread over: (sum |m|)^2 / (tokens x sum m^2)",
    "weight/divergence": "size of the divergence's part of m beside the whole of m",
}
"""What the figures mean that a run does not record under the same name, or records of its updates only."""


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
