"""From sampled responses to padded microbatches: who trains on what, and in which shapes.

Everything here follows from the lengths alone and is the same on every rank, so that the ranks agree without talking.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rpg.rewards.score import Score
from rpg.types import FinishReason, RolloutGroup

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """A step's responses in the order of its prompts, their tokens laid end to end."""

    prompts: tuple[Integers, ...]
    """Token ids of the prompt of each group."""
    problems: tuple[int, ...]
    """Index of the problem of each group."""
    group_ids: Integers
    """Of each response: which group it belongs to, from 0. [B]"""
    token_ids: Integers
    """Sampled tokens of all responses. [N]"""
    rollout_logprobs: Floats
    """Of the sampled tokens under the distribution they were drawn from, nats. [N]"""
    lengths: Integers
    """Tokens of each response. [B]"""
    finish_reasons: tuple[FinishReason, ...]
    responses: tuple[str, ...]
    """The text of each response."""
    scores: tuple[Score, ...]
    policy_version: int
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics of how the batch came about."""

    @property
    def starts(self) -> Integers:
        """Where each response begins among the tokens, and where the last one ends. [B + 1]"""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def sequence_lengths(self) -> Integers:
        """Tokens of prompt and response. [B]"""
        return np.array([len(prompt) for prompt in self.prompts], dtype=np.int64)[self.group_ids] + self.lengths

    @property
    def rewards(self) -> Floats:
        """Of each response, penalties included. [B]"""
        return np.array([score.reward for score in self.scores], dtype=np.float32)

    @property
    def truncated(self) -> npt.NDArray[np.bool_]:
        """Whether a response was cut at the maximum length. [B]"""
        return np.array([reason == "length" for reason in self.finish_reasons])


def collate(
    groups: Sequence[RolloutGroup], *, problems: Sequence[int], responses: Sequence[str], scores: Sequence[Score]
) -> StepRollouts:
    """Lays the groups' responses end to end; `problems` has one entry a group, the others one a response."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sizes = [len(group.rollouts) for group in groups]
    return StepRollouts(
        prompts=tuple(np.array(group.prompt_ids, dtype=np.int64) for group in groups),
        problems=tuple(problems),
        group_ids=np.repeat(np.arange(len(groups), dtype=np.int64), sizes),
        token_ids=np.concatenate([np.array(rollout.response_ids, dtype=np.int64) for rollout in rollouts]),
        rollout_logprobs=np.concatenate([np.array(rollout.rollout_logprobs, dtype=np.float32) for rollout in rollouts]),
        lengths=np.array([len(rollout.response_ids) for rollout in rollouts], dtype=np.int64),
        finish_reasons=tuple(rollout.finish_reason for rollout in rollouts),
        responses=tuple(responses),
        scores=tuple(scores),
        policy_version=groups[0].policy_version,
    )


def join(parts: Sequence[StepRollouts]) -> StepRollouts:
    """The ranks' shares as one, in the order of the ranks."""
    offsets = np.cumsum([0] + [len(part.prompts) for part in parts])
    return StepRollouts(
        prompts=tuple(prompt for part in parts for prompt in part.prompts),
        problems=tuple(problem for part in parts for problem in part.problems),
        group_ids=np.concatenate([part.group_ids + offset for part, offset in zip(parts, offsets, strict=False)]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        rollout_logprobs=np.concatenate([part.rollout_logprobs for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        finish_reasons=tuple(reason for part in parts for reason in part.finish_reasons),
        responses=tuple(text for part in parts for text in part.responses),
        scores=tuple(score for part in parts for score in part.scores),
        policy_version=parts[0].policy_version,
    )


def select(step: StepRollouts, groups: Sequence[int]) -> StepRollouts:
    """The batch with these groups alone, in this order."""
    members = [np.flatnonzero(step.group_ids == group) for group in groups]
    index = np.concatenate([np.empty(0, dtype=np.int64), *members])
    tokens = np.concatenate([np.empty(0, dtype=np.int64), *(_tokens_of(step, each) for each in members)])
    return StepRollouts(
        prompts=tuple(step.prompts[group] for group in groups),
        problems=tuple(step.problems[group] for group in groups),
        group_ids=np.repeat(np.arange(len(groups), dtype=np.int64), [len(each) for each in members]),
        token_ids=step.token_ids[tokens],
        rollout_logprobs=step.rollout_logprobs[tokens],
        lengths=step.lengths[index],
        finish_reasons=tuple(step.finish_reasons[response] for response in index),
        responses=tuple(step.responses[response] for response in index),
        scores=tuple(step.scores[response] for response in index),
        policy_version=step.policy_version,
    )


def _tokens_of(step: StepRollouts, responses: Integers) -> Integers:
    """Where the responses' tokens stand among the step's."""
    starts = step.starts
    return np.concatenate([np.arange(starts[response], starts[response + 1]) for response in responses])


@dataclass(frozen=True, slots=True)
class Rows:
    """Which responses make up one forward pass on this rank."""

    rollouts: tuple[int, ...]
    counts: bool = True
    """False: a pass that only keeps the ranks' collectives in step; its tokens weigh nothing."""


def plan_microbatches(
    lengths: Integers, rollouts: Sequence[int], *, ranks: int, rank: int, max_tokens: int, packed: bool = False
) -> list[Rows]:
    """This rank's passes over a minibatch: an equal share of the tokens, at most `max_tokens` a pass, padding included.

    Every rank gets the same number of passes; one with fewer of its own fills up with passes that do not count.

    Args:
        lengths: tokens of prompt and response of each of the step's responses.
        rollouts: the minibatch, as indices into `lengths`.
        max_tokens: bound on rows x longest row, or packed on the sum of the lengths. A response longer than that is a
            pass of its own.
        packed: the sequences are laid end to end, so that nothing is padded.
    """
    plans = [_group(lengths, share, max_tokens, packed=packed) for share in _shares(lengths, rollouts, ranks)]
    shortest = min(rollouts, key=lambda index: (lengths[index], index))
    idle = max(map(len, plans)) - len(plans[rank])
    return [Rows(pack) for pack in plans[rank]] + [Rows((shortest,), counts=False)] * idle


def _shares(lengths: Integers, rollouts: Sequence[int], ranks: int) -> list[list[int]]:
    """Longest first, each to the rank that has the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in _longest_first(lengths, rollouts):
        lightest = loads.index(min(loads))
        shares[lightest].append(index)
        loads[lightest] += int(lengths[index])
    return shares


def _group(lengths: Integers, rollouts: Sequence[int], max_tokens: int, *, packed: bool) -> list[tuple[int, ...]]:
    """Neighbours in length together, so that little is padded."""
    groups: list[list[int]] = []
    tokens = 0
    for index in _longest_first(lengths, rollouts):
        if packed or not groups:
            tokens += int(lengths[index])
        else:
            tokens = int(lengths[groups[-1][0]]) * (len(groups[-1]) + 1)
        if groups and tokens <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
            tokens = int(lengths[index])
    return [tuple(group) for group in groups]


def _longest_first(lengths: Integers, rollouts: Sequence[int]) -> list[int]:
    return sorted(rollouts, key=lambda index: (-int(lengths[index]), index))


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward pass: b sequences of at most L tokens, their n response tokens, responses of at most T tokens."""

    input_ids: Tensor
    """Prompt and response, padded on the right, where causal attention never looks [b, L]; packed, all in one row
    [1, L]."""
    packed: tuple[int, ...]
    """Of a packed row: the length of each sequence, in order. Empty where each has a row of its own."""
    sources: Tensor
    """Positions in the flattened input ids whose hidden state predicts a response token, row by row. [n]"""
    targets: Tensor
    """Those response tokens. [n]"""
    tokens: Tensor
    """Where those tokens stand among the step's, on the host. [n]"""
    response_mask: Tensor
    """1 where the policy sampled and the token counts. [b, T]"""
    places: Tensor
    """Positions of the n tokens in the flattened [b * T]. [n]"""
    rollouts: Tensor
    """Index of each row's response in the step, on the host. [b]"""
    rollout_logprobs: Tensor
    """Of those response tokens by the engine that sampled them, nats. [n]"""
    counts: bool
    """False: its tokens weigh nothing, see Rows."""

    def pick(self, values: Tensor) -> Tensor:
        """The response tokens' values of [b, T], as [n]."""
        return values.flatten()[self.places]

    def spread(self, values: Tensor) -> Tensor:
        """[n] values of the response tokens as [b, T], 0 elsewhere; differentiable."""
        return (
            values.new_zeros(self.response_mask.numel()).index_copy(0, self.places, values).view_as(self.response_mask)
        )


def microbatch(step: StepRollouts, rows: Rows, device: torch.device, *, packed: bool = False) -> Microbatch:
    """Pads the responses of one pass, or lays them end to end, and notes where their tokens stand."""
    index = np.array(rows.rollouts, dtype=np.int64)
    lengths, starts = step.lengths[index], step.starts[index]
    prompts = [step.prompts[group] for group in step.group_ids[index]]
    heads = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    whole, longest = heads + lengths, int(lengths.max())
    ends = np.cumsum(whole) if packed else np.arange(1, len(index) + 1) * whole.max()
    begins = ends - whole if packed else ends - whole.max()
    row = np.repeat(np.arange(len(index)), lengths)
    column = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    tokens = np.repeat(starts, lengths) + column
    input_ids = np.zeros(ends[-1], dtype=np.int64)
    for begin, prompt in zip(begins, prompts, strict=True):
        input_ids[begin : begin + len(prompt)] = prompt
    places = begins[row] + heads[row] + column
    input_ids[places] = step.token_ids[tokens]
    mask = np.zeros((len(index), longest), dtype=np.float32)
    mask[row, column] = float(rows.counts)

    def place(array: Integers | Floats) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Microbatch(
        input_ids=place(input_ids.reshape(1 if packed else len(index), -1)),
        packed=tuple(whole.tolist()) if packed else (),
        sources=place(places - 1),
        targets=place(step.token_ids[tokens]),
        tokens=torch.from_numpy(tokens),
        response_mask=place(mask),
        places=place(row * longest + column),
        rollouts=torch.from_numpy(index),
        rollout_logprobs=place(step.rollout_logprobs[tokens]),
        counts=rows.counts,
    )
