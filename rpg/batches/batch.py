"""A step's responses as arrays, and as the tensors of a forward pass."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rpg.batches.packing_plan import Integers, Rows
from rpg.messages import message
from rpg.rewards.score import Score
from rpg.types import FinishReason, RecordedTurn, RolloutGroup, TurnCounts

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@message
@dataclass(frozen=True)
class StepRollouts:
    """A step's B responses in the order of its prompts. Every rank knows of each its length, reward and group; its
    tokens and its text are on one rank, which holds it.

    Of the N tokens of the b responses held here, laid end to end, the policy sampled M; the others were given to it by
    its environment. Given tokens are context: whatever is known of a token's probability (logprobs, advantages, the
    token ledger) is an array over the M sampled tokens alone, laid end to end too, so that nothing can be trained on a
    given one.
    """

    prompts: tuple[Integers, ...]
    """Token ids of the prompt of each group."""
    problems: tuple[int, ...]
    """Index of the problem of each group."""
    group_ids: Integers
    """Group index of each response, from 0. [B]"""
    lengths: Integers
    """Tokens of each response, the given ones included. [B]"""
    num_sampled: Integers
    """Sampled tokens of each response, at least 1. [B]"""
    finish_reasons: tuple[FinishReason, ...]
    scores: tuple[Score, ...]
    held: Integers
    """The responses that this rank holds, ascending. [b]"""
    token_ids: Integers
    """Their tokens. [N]"""
    sampled: Bools
    """Which of them the policy sampled. [N]"""
    rollout_logprobs: Floats
    """Logprobs of the sampled tokens under the distribution they were drawn from, nats. [M]"""
    responses: tuple[str, ...]
    """The text of each response that this rank holds."""
    policy_version: int
    turns: tuple[tuple[RecordedTurn, ...], ...] = ()
    """The turns of each response that this rank holds; nothing where the environment gives no turn."""
    turn_counts: tuple[TurnCounts, ...] = ()
    """Counts of the turns of each response; nothing where the environment gives no turn. [B]"""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics of how the batch came about."""

    @property
    def held_lengths(self) -> Integers:
        """Tokens of each response held here. [b]"""
        return self.lengths[self.held]

    @property
    def held_num_sampled(self) -> Integers:
        """Sampled tokens of each response held here. [b]"""
        return self.num_sampled[self.held]

    @property
    def prompt_lengths(self) -> Integers:
        """Tokens of each response's prompt. [B]"""
        return np.array([len(prompt) for prompt in self.prompts], dtype=np.int64)[self.group_ids]

    @property
    def sequence_lengths(self) -> Integers:
        """Tokens of prompt and response. [B]"""
        return self.prompt_lengths + self.lengths

    @property
    def rewards(self) -> Floats:
        """Reward of each response, penalties included. [B]"""
        return np.array([score.reward for score in self.scores], dtype=np.float32)

    def reward_terms(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Values and weights of the terms of each response's reward; one that is no sum is a term by itself.

        A value is NaN where the response could not be scored, and 0 with weight 0 of a term that its group has not.
        [terms, B] each, float64
        """
        whole = {"": 1.0}
        of_group = {
            group: score.weights or whole
            for group, score in zip(self.group_ids, self.scores, strict=True)
            if score.error is None
        }
        weights = [of_group.get(group, whole) for group in self.group_ids]
        labels = sorted({label for each in weights for label in each})
        values = np.zeros((len(labels), len(self.scores)))
        for place, (score, held) in enumerate(zip(self.scores, weights, strict=True)):
            terms = score.terms or {"": score.value}
            known = [terms.get(label, 0.0) if score.error is None else np.nan for label in labels]
            values[:, place] = [value if label in held else 0.0 for label, value in zip(labels, known, strict=True)]
        return values, np.array([[each.get(label, 0.0) for each in weights] for label in labels])

    @property
    def turn_rewards(self) -> list[tuple[float, ...]]:
        """Reward of each turn of the policy, of each response; 0 where its environment rewards none. [B]"""
        return [counts.rewards or (0.0,) * counts.sampled for counts in self.turn_counts]

    @property
    def token_turns(self) -> Integers:
        """Which turn of the policy each sampled token held here is of, from 0 in each response. [M]"""
        sampled = [[turn.num_tokens for turn in turns if turn.sampled] for turns in self.turns]
        return np.concatenate(
            [np.empty(0, dtype=np.int64), *(np.repeat(np.arange(len(sizes)), sizes) for sizes in sampled)]
        )

    @property
    def truncated(self) -> Bools:
        """Whether a response was cut at the maximum length. [B]"""
        return np.array([reason == "length" for reason in self.finish_reasons])


def collate(
    groups: Sequence[RolloutGroup],
    *,
    problems: Sequence[int],
    responses: Sequence[str],
    scores: Sequence[Score],
    turns: Sequence[tuple[RecordedTurn, ...]] = (),
) -> StepRollouts:
    """Lays the groups' responses end to end; `problems` has one entry a group, the others one a response. `turns` is
    empty where none are recorded."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    parts = [turn for rollout in rollouts for turn in rollout.turns]
    sizes = [len(group.rollouts) for group in groups]
    return StepRollouts(
        prompts=tuple(np.array(group.prompt_ids, dtype=np.int64) for group in groups),
        problems=tuple(problems),
        group_ids=np.repeat(np.arange(len(groups), dtype=np.int64), sizes),
        lengths=np.array([rollout.length for rollout in rollouts], dtype=np.int64),
        num_sampled=np.array([rollout.num_sampled for rollout in rollouts], dtype=np.int64),
        finish_reasons=tuple(rollout.finish_reason for rollout in rollouts),
        scores=tuple(scores),
        held=np.arange(len(rollouts), dtype=np.int64),
        token_ids=np.concatenate([np.array(turn.token_ids, dtype=np.int64) for turn in parts]),
        sampled=np.repeat([turn.sampled for turn in parts], [len(turn.token_ids) for turn in parts]),
        rollout_logprobs=np.concatenate([np.array(turn.logprobs, dtype=np.float32) for turn in parts if turn.sampled]),
        responses=tuple(responses),
        policy_version=groups[0].policy_version,
        turns=tuple(turns),
        turn_counts=tuple(map(counted, turns)),
    )


def counted(turns: Sequence[RecordedTurn]) -> TurnCounts:
    """Counts of a response's turns."""
    called = [turn for turn in turns if turn.tool or turn.error]
    rewarded = any(turn.reward is not None for turn in turns)
    return TurnCounts(
        sum(turn.sampled for turn in turns),
        len(called),
        sum(bool(turn.error) for turn in called),
        sum(turn.seconds for turn in called),
        tuple(turn.reward or 0.0 for turn in turns if turn.sampled and rewarded),
    )


def join(parts: Sequence[StepRollouts]) -> StepRollouts:
    """Several batches as one, in their order: the shares of the ranks, or rounds of sampling."""
    groups = np.cumsum([0] + [len(part.problems) for part in parts])
    responses = np.cumsum([0] + [len(part.lengths) for part in parts])
    return StepRollouts(
        prompts=tuple(prompt for part in parts for prompt in part.prompts),
        problems=tuple(problem for part in parts for problem in part.problems),
        group_ids=np.concatenate([part.group_ids + before for part, before in zip(parts, groups, strict=False)]),
        lengths=np.concatenate([part.lengths for part in parts]),
        num_sampled=np.concatenate([part.num_sampled for part in parts]),
        finish_reasons=tuple(reason for part in parts for reason in part.finish_reasons),
        scores=tuple(score for part in parts for score in part.scores),
        held=np.concatenate([part.held + before for part, before in zip(parts, responses, strict=False)]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        sampled=np.concatenate([part.sampled for part in parts]),
        rollout_logprobs=np.concatenate([part.rollout_logprobs for part in parts]),
        responses=tuple(text for part in parts for text in part.responses),
        policy_version=parts[0].policy_version,
        turns=tuple(turns for part in parts for turns in part.turns),
        turn_counts=tuple(counts for part in parts for counts in part.turn_counts),
    )


def select(step: StepRollouts, groups: Sequence[int]) -> StepRollouts:
    """The batch with these groups alone, in this order."""
    members = [np.flatnonzero(step.group_ids == group) for group in groups]
    index = np.concatenate([np.empty(0, dtype=np.int64), *members])
    is_held = np.isin(index, step.held)
    kept = keep(step, np.searchsorted(step.held, index[is_held]))
    return StepRollouts(
        prompts=tuple(step.prompts[group] for group in groups),
        problems=tuple(step.problems[group] for group in groups),
        group_ids=np.repeat(np.arange(len(groups), dtype=np.int64), [len(each) for each in members]),
        lengths=step.lengths[index],
        num_sampled=step.num_sampled[index],
        finish_reasons=tuple(step.finish_reasons[response] for response in index),
        scores=tuple(step.scores[response] for response in index),
        held=np.flatnonzero(is_held),
        token_ids=kept.token_ids,
        sampled=kept.sampled,
        rollout_logprobs=kept.rollout_logprobs,
        responses=kept.responses,
        policy_version=step.policy_version,
        turns=kept.turns,
        turn_counts=tuple(step.turn_counts[response] for response in index) if step.turn_counts else (),
    )


def keep(step: StepRollouts, places: Integers) -> StepRollouts:
    """The batch, of whose responses this rank holds these alone, in this order; `places`: among those that it holds."""
    tokens = _places(step.held_lengths, places)
    return replace(
        step,
        held=step.held[places],
        token_ids=step.token_ids[tokens],
        sampled=step.sampled[tokens],
        rollout_logprobs=step.rollout_logprobs[_places(step.held_num_sampled, places)],
        responses=tuple(step.responses[place] for place in places),
        turns=tuple(step.turns[place] for place in places) if step.turns else (),
    )


def _places(lengths: Integers, responses: Integers) -> Integers:
    """Where the tokens of chosen responses stand, all responses having these lengths and being laid end to end."""
    chosen = lengths[responses]
    first = (np.cumsum(lengths) - lengths)[responses]
    within: Integers = np.arange(chosen.sum()) - np.repeat(np.cumsum(chosen) - chosen, chosen)
    return within + np.repeat(first, chosen)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward pass: b sequences of at most L tokens, responses of at most T tokens, n of which were sampled.

    Given tokens are among the input ids, as a prompt's are, and nowhere else.
    """

    input_ids: Tensor
    """Prompt and response, padded on the right, where causal attention never looks [b, L]; packed, all in one row
    [1, L], where the responses to a prompt follow it one after another."""
    packed: tuple[tuple[int, ...], ...]
    """Layout of a packed row: for each prompt in it its length and those of its responses, see Packing. Empty where
    each response has a row of its own."""
    sources: Tensor
    """Positions in the flattened input ids whose hidden state predicts a sampled token, row by row. [n]"""
    host_sources: Tensor
    """`sources` on the host, where they can be read without waiting for the device. [n]"""
    targets: Tensor
    """Ids of the sampled tokens. [n]"""
    tokens: Tensor
    """Where they stand among the M sampled tokens that this rank holds. [n]"""
    response_mask: Tensor
    """1 where the policy sampled and the token counts; 0 on given tokens and padding. [b, T]"""
    places: Tensor
    """Positions of the n tokens in the flattened [b * T]. [n]"""
    rollouts: Tensor
    """Index of each row's response in the step, on the host. [b]"""
    rollout_logprobs: Tensor
    """Logprobs of the sampled tokens by the engine that sampled them, nats. [n]"""
    counts: bool
    """False: its only token is none of the step's and weighs nothing, see Rows."""

    def look_up(self, values: Tensor) -> Tensor:
        """From [M] values of all sampled tokens held here, those of this pass, on its device; 0 where it does not
        count. Values that are on that device already are looked up without waiting for it. [n]"""
        values = values.to(self.tokens.device)
        return values[self.tokens] if self.counts else values.new_zeros(len(self.tokens))

    def pick(self, values: Tensor) -> Tensor:
        """The sampled tokens' values of [b, T], as [n]."""
        return values.flatten()[self.places]

    def spread(self, values: Tensor) -> Tensor:
        """[n] values of the sampled tokens as [b, T], 0 elsewhere; differentiable."""
        return (
            values.new_zeros(self.response_mask.numel()).index_copy(0, self.places, values).view_as(self.response_mask)
        )


def microbatch(step: StepRollouts, rows: Rows, device: torch.device, *, packed: bool = False) -> Microbatch:
    """The tensors of one forward pass: its responses padded to one width, or packed into one row.

    In a packed row neighbours of one group share one copy of their prompt. The responses are held here.
    """
    if not rows.counts:
        idle = microbatch(_IDLE, Rows((0,)), device, packed=packed)
        return replace(idle, response_mask=torch.zeros_like(idle.response_mask), counts=False)
    index = np.array(rows.rollouts, dtype=np.int64)
    places = np.searchsorted(step.held, index)
    lengths, groups = step.lengths[index], step.group_ids[index]
    prompts = [step.prompts[group] for group in groups]
    prompt_lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    layout = _packed(lengths, prompt_lengths, groups) if packed else _padded(lengths, prompt_lengths)
    row = np.repeat(np.arange(len(index)), lengths)
    column = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = layout.first_tokens[row] + column
    tokens = _places(step.held_lengths, places)
    input_ids = np.zeros(layout.size, dtype=np.int64)
    for owner in np.unique(layout.prompt_owners):
        end = layout.first_tokens[owner]
        input_ids[end - prompt_lengths[owner] : end] = prompts[owner]
    input_ids[positions] = step.token_ids[tokens]
    sampled = step.sampled[tokens]
    # A response's first token is predicted by the last one of its prompt, which may stand before another response.
    prompt_ends = layout.first_tokens[layout.prompt_owners][row]
    sources = np.where(column > 0, positions, prompt_ends)[sampled] - 1
    longest = int(lengths.max())
    cells = (row * longest + column)[sampled]
    mask = np.zeros(len(index) * longest, dtype=np.float32)
    mask[cells] = 1.0
    sampled_tokens = _places(step.held_num_sampled, places)

    def on_device(array: Integers | Floats) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Microbatch(
        input_ids=on_device(input_ids.reshape(1 if packed else len(index), -1)),
        packed=tuple(_families(lengths, prompt_lengths, layout.prompt_owners)) if packed else (),
        sources=on_device(sources),
        host_sources=torch.from_numpy(sources),
        targets=on_device(step.token_ids[tokens][sampled]),
        tokens=on_device(sampled_tokens),
        response_mask=on_device(mask.reshape(len(index), longest)),
        places=on_device(cells),
        rollouts=torch.from_numpy(index),
        rollout_logprobs=on_device(step.rollout_logprobs[sampled_tokens]),
        counts=True,
    )


_IDLE = StepRollouts(
    prompts=(np.zeros(1, dtype=np.int64),),
    problems=(0,),
    group_ids=np.zeros(1, dtype=np.int64),
    lengths=np.ones(1, dtype=np.int64),
    num_sampled=np.ones(1, dtype=np.int64),
    finish_reasons=("stop",),
    scores=(Score(value=0.0, correct=False),),
    held=np.zeros(1, dtype=np.int64),
    token_ids=np.zeros(1, dtype=np.int64),
    sampled=np.ones(1, dtype=np.bool_),
    rollout_logprobs=np.zeros(1, dtype=np.float32),
    responses=("",),
    policy_version=0,
)
"""What a pass that does not count computes: one token after one token."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the b responses of a pass stand in its flattened input ids."""

    prompt_owners: Integers
    """Index of the response that each response's prompt stands directly before. [b]"""
    first_tokens: Integers
    """Position of each response's first token. [b]"""
    size: int
    """Input ids, padding included."""


def _padded(lengths: Integers, prompt_lengths: Integers) -> _Layout:
    """A row for each response, behind a prompt of its own."""
    responses, width = np.arange(len(lengths)), int((prompt_lengths + lengths).max())
    return _Layout(responses, responses * width + prompt_lengths, len(lengths) * width)


def _packed(lengths: Integers, prompt_lengths: Integers, groups: Integers) -> _Layout:
    """One row without padding; the first of neighbours of one group has their prompt before it."""
    owns_prompt = np.diff(groups, prepend=-1) != 0
    owners = np.maximum.accumulate(np.where(owns_prompt, np.arange(len(lengths)), 0))
    ends = np.cumsum(lengths + prompt_lengths * owns_prompt)
    return _Layout(owners, ends - lengths, int(ends[-1]))


def _families(lengths: Integers, prompt_lengths: Integers, owners: Integers) -> Iterator[tuple[int, ...]]:
    """For each prompt of a packed row its length, then those of the responses behind it."""
    for owner in np.unique(owners):
        yield int(prompt_lengths[owner]), *lengths[owners == owner].tolist()
