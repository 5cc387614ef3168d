"""A step's responses as arrays, and as the tensors of a forward pass."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rpg.batches.packing_plan import Integers, Rows
from rpg.messages import message
from rpg.rewards.score import Score
from rpg.types import FinishReason, RecordedTurn, Rollout, RolloutGroup, TurnCounts

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Experts = npt.NDArray[np.int16]


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
    experts: Experts | None = None
    """Experts of each token of prompt and response of the responses held here, end to end; those of a last token mean
    nothing. None: the learner's routers choose. [tokens, layers, experts a token]"""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics of how the batch came about."""

    @property
    def held_lengths(self) -> Integers:
        """Tokens of each response held here. [b]"""
        return self.lengths[self.held]

    @property
    def held_sequence_lengths(self) -> Integers:
        """Tokens of prompt and response of each response held here. [b]"""
        return self.sequence_lengths[self.held]

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
    def restarts(self) -> bool:
        """Whether a response has a context of its own somewhere, see TurnCounts.contexts."""
        return any(counts.contexts for counts in self.turn_counts)

    def parts(self, response: int) -> list["Part"]:
        """Stretches of a response, each behind the context that its tokens were sampled in."""
        contexts = self.turn_counts[response].contexts if self.turn_counts else ()
        places = [place for place, _ in contexts]
        bounds = pairwise([0, *places, int(self.lengths[response])])
        prompt = len(self.prompts[self.group_ids[response]])
        given = [(prompt, 0), *((length, length) for _, length in contexts)]
        parts = [
            Part(begin + within, end, context) for (begin, end), (context, within) in zip(bounds, given, strict=True)
        ]
        return [part for part in parts if part.begin < part.end]

    def padded_rows(self) -> tuple[Integers, Integers]:
        """Rows that each response has in a padded pass, one a part, and the longest of them, context included. [B]
        each"""
        if not self.restarts:
            return np.ones(len(self.lengths), dtype=np.int64), self.sequence_lengths
        parts = [self.parts(response) for response in range(len(self.lengths))]
        longest = [max(part.context + part.end - part.begin for part in each) for each in parts]
        return np.array([len(each) for each in parts]), np.array(longest)

    @cached_property
    def sampled_places(self) -> Integers:
        """Place of each token held here among the sampled ones; of a given token it says nothing. [N]"""
        return np.cumsum(self.sampled) - 1

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """Reward of each response, penalties included. [B]"""
        return np.array([score.reward for score in self.scores], dtype=np.float64)

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


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a response behind one context: the prompt, or tokens that were given as a context."""

    begin: int
    """Place of its first token in the response, the context not counted."""
    end: int
    """Place behind its last token."""
    context: int
    """Tokens of the context. One that is not the prompt stands in the response, directly before the stretch."""


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
        experts=_experts(rollouts),
    )


def _experts(rollouts: Sequence[Rollout]) -> Experts | None:
    """Experts of all tokens end to end, a last token's those of the one before it."""
    known = [rollout.experts.astype(np.int16) for rollout in rollouts if rollout.experts is not None]
    assert len(known) in (0, len(rollouts)), "all responses are sampled alike"
    return np.concatenate([part for each in known for part in (each, each[-1:])]) if known else None


def counted(turns: Sequence[RecordedTurn]) -> TurnCounts:
    """Counts of a response's turns."""
    called = [turn for turn in turns if not turn.sampled and (turn.tool or turn.error)]
    rewarded = any(turn.reward is not None for turn in turns)
    ends = np.cumsum([turn.num_tokens for turn in turns]).tolist()
    return TurnCounts(
        sum(turn.sampled for turn in turns),
        len(called),
        sum(bool(turn.error) for turn in called),
        sum(turn.seconds for turn in called),
        tuple(turn.reward or 0.0 for turn in turns if turn.sampled and rewarded),
        tuple((end - turn.num_tokens, turn.num_tokens) for turn, end in zip(turns, ends, strict=True) if turn.restart),
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
        experts=experts_of([part.experts for part in parts]),
    )


def experts_of(parts: Sequence[Experts | None]) -> Experts | None:
    """Those of all parts end to end, where there are any."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if known else None


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
        experts=kept.experts,
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
        experts=None if step.experts is None else step.experts[_places(step.held_sequence_lengths, places)],
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
    [1, L], where the responses to a prompt follow it one after another. A part of a response behind another context
    stands behind that as if it were a response by itself, so that there may be more rows than responses."""
    packed: tuple[tuple[int, ...], ...]
    """Layout of a packed row: for each prompt in it its length and those of its responses, see Packing. Empty where
    each response has rows of its own."""
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
    """Index of each response in the step, on the host. [b]"""
    rollout_logprobs: Tensor
    """Logprobs of the sampled tokens by the engine that sampled them, nats. [n]"""
    rewards: Tensor
    """Reward of each response, on the host. [b]"""
    counts: bool
    """False: its only token is none of the step's and weighs nothing, see Rows."""
    experts: Tensor | None = None
    """Experts that each of the flattened input ids is sent to, on the host. None: the routers choose. [b * L, layers,
    experts a token]"""

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
    held = np.searchsorted(step.held, index)
    first_held = (np.cumsum(step.held_lengths) - step.held_lengths)[held]
    parts = _parts(step, index)
    layout = _packed(parts) if packed else _padded(parts)
    part = np.repeat(np.arange(len(parts.lengths)), parts.lengths)
    within = np.arange(len(part)) - np.repeat(np.cumsum(parts.lengths) - parts.lengths, parts.lengths)
    positions = layout.first_tokens[part] + within
    row, column = parts.responses[part], parts.begins[part] + within
    tokens = first_held[row] + column
    input_ids = np.zeros(layout.size, dtype=np.int64)
    for owner in np.unique(layout.context_owners):
        end, length, response = layout.first_tokens[owner], parts.contexts[owner], parts.responses[owner]
        begin = first_held[response] + parts.begins[owner] - length
        of_group = parts.groups[owner] >= 0
        context = step.prompts[parts.groups[owner]] if of_group else step.token_ids[begin : begin + length]
        input_ids[end - length : end] = context
    input_ids[positions] = step.token_ids[tokens]
    sampled = step.sampled[tokens]
    # A part's first token is predicted by the last one of its context, which may stand before another response.
    context_ends = layout.first_tokens[layout.context_owners][part]
    sources = np.where(within > 0, positions, context_ends)[sampled] - 1
    longest = int(step.lengths[index].max())
    cells = (row * longest + column)[sampled]
    mask = np.zeros(len(index) * longest, dtype=np.float32)
    mask[cells] = 1.0
    sampled_tokens = step.sampled_places[tokens[sampled]]

    def on_device(array: Integers | Floats) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Microbatch(
        input_ids=on_device(input_ids.reshape(1 if packed else len(parts.lengths), -1)),
        packed=tuple(_families(parts, layout)) if packed else (),
        sources=on_device(sources),
        host_sources=torch.from_numpy(sources),
        targets=on_device(step.token_ids[tokens][sampled]),
        tokens=on_device(sampled_tokens),
        response_mask=on_device(mask.reshape(len(index), longest)),
        places=on_device(cells),
        rollouts=torch.from_numpy(index),
        rollout_logprobs=on_device(step.rollout_logprobs[sampled_tokens]),
        rewards=torch.tensor([step.scores[response].reward for response in index]),
        counts=True,
        experts=None if step.experts is None else torch.from_numpy(_experts_of_ids(step, held, parts, layout)),
    )


def _experts_of_ids(step: StepRollouts, held: Integers, parts: "_Parts", layout: "_Layout") -> Experts:
    """Experts of the input ids of a pass; padding has those of the first token. A prompt has them from the first
    response behind it. No response has a context of its own here."""
    assert step.experts is not None
    ends = np.cumsum(step.held_sequence_lengths)[held]
    experts = np.repeat(step.experts[:1], layout.size, axis=0)
    for number, (length, context) in enumerate(zip(parts.lengths.tolist(), parts.contexts.tolist(), strict=True)):
        before = context if layout.context_owners[number] == number else 0
        first, end = layout.first_tokens[number], ends[parts.responses[number]]
        experts[first - before : first + length] = step.experts[end - length - before : end]
    return experts


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
class _Parts:
    """The p parts of the b responses of a pass: those behind the prompts first, in the order of the responses, so that
    neighbours of a group stand together."""

    responses: Integers
    """Index in the pass of each part's response. [p]"""
    groups: Integers
    """Group whose prompt is the context; -1: the context stands in the response. [p]"""
    begins: Integers
    """Place of the first token in the response. [p]"""
    lengths: Integers
    """Tokens, the context not counted. [p]"""
    contexts: Integers
    """Tokens of the context. [p]"""


def _parts(step: StepRollouts, index: Integers) -> _Parts:
    """The parts of the responses of these indices in the step."""
    groups, numbers = step.group_ids[index], np.arange(len(index))
    if not step.restarts:
        return _Parts(numbers, groups, np.zeros_like(numbers), step.lengths[index], step.prompt_lengths[index])
    parts = [(place, part) for place, response in enumerate(index.tolist()) for part in step.parts(response)]
    parts.sort(key=lambda each: each[1].begin > 0)
    responses = np.array([place for place, _ in parts], dtype=np.int64)
    begins, ends, contexts = np.array([(part.begin, part.end, part.context) for _, part in parts], dtype=np.int64).T
    return _Parts(responses, np.where(begins > 0, -1, groups[responses]), begins, ends - begins, contexts)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the p parts of a pass stand in its flattened input ids."""

    context_owners: Integers
    """Index of the part that each part's context stands directly before. [p]"""
    first_tokens: Integers
    """Position of each part's first token. [p]"""
    size: int
    """Input ids, padding included."""


def _padded(parts: _Parts) -> _Layout:
    """A row for each part, behind a context of its own."""
    numbers, width = np.arange(len(parts.lengths)), int((parts.contexts + parts.lengths).max())
    return _Layout(numbers, numbers * width + parts.contexts, len(numbers) * width)


def _packed(parts: _Parts) -> _Layout:
    """One row without padding; the first of neighbours of one group has their prompt before it."""
    owns_context = (np.diff(parts.groups, prepend=-1) != 0) | (parts.groups < 0)
    owners = np.maximum.accumulate(np.where(owns_context, np.arange(len(parts.lengths)), 0))
    ends = np.cumsum(parts.lengths + parts.contexts * owns_context)
    return _Layout(owners, ends - parts.lengths, int(ends[-1]))


def _families(parts: _Parts, layout: _Layout) -> Iterator[tuple[int, ...]]:
    """For each context of a packed row its length, then those of the parts behind it."""
    for owner in np.unique(layout.context_owners):
        yield int(parts.contexts[owner]), *parts.lengths[layout.context_owners == owner].tolist()
