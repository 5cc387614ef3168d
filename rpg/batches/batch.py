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
from rpg.types import FinishReason, RecordedTurn, Rollout, RolloutGroup, TurnCounts, Versions

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Experts = npt.NDArray[np.int16]


@message
@dataclass(frozen=True)
class StepRollouts:
    """A step's B responses in the order of its prompts. Every rank knows the length, reward and group of each response.
    Its tokens and text are on a single rank, which *holds* the response.

    Of the N tokens of the b responses held here, laid end to end, the policy sampled M; its environment gave the
    others. Given tokens are context. Every array about token probabilities (logprobs, advantages, the token table)
    covers only the M sampled tokens, also laid end to end, so nothing can train on a given token.
    """

    prompts: tuple[Integers, ...]
    """Token ids of each group's prompt."""
    problems: tuple[int, ...]
    """Index of each group's problem."""
    group_ids: Integers
    """Group index of each response, from 0. [B]"""
    lengths: Integers
    """Number of tokens of each response, including given tokens. [B]"""
    num_sampled: Integers
    """Sampled tokens of each response, at least 1. [B]"""
    finish_reasons: tuple[FinishReason, ...]
    scores: tuple[Score, ...]
    held: Integers
    """Indices of the responses that this rank holds, ascending. [b]"""
    token_ids: Integers
    """Token ids of the responses held here. [N]"""
    sampled: Bools
    """Whether the policy sampled each of these tokens. [N]"""
    rollout_logprobs: Floats
    """Logprobs of the sampled tokens under the distribution that they were drawn from, nats. [M]"""
    responses: tuple[str, ...]
    """The text of each response that this rank holds."""
    policy_version: int
    """Version of the policy that sampled the responses. If `versions` is set, that of the policy that sampled their
    last tokens."""
    turns: tuple[tuple[RecordedTurn, ...], ...] = ()
    """The turns of each response that this rank holds; empty if the environment gives no turn."""
    turn_counts: tuple[TurnCounts, ...] = ()
    """Counts of the turns of each response; empty if the environment gives no turn. [B]"""
    experts: Experts | None = None
    """Experts of each token of prompt and response, for the responses held here, laid end to end. The values for a
    response's last token are meaningless. None means that the learner's routers choose. [tokens, layers, experts per
    token]"""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics about the sampling of the batch."""
    versions: tuple[Versions, ...] = ()
    """Versions of the policies that sampled each response, one after another; empty if one policy sampled all
    responses. [B]"""

    @property
    def held_lengths(self) -> Integers:
        """Returns the number of tokens of each response held here. [b]"""
        return self.lengths[self.held]

    @property
    def held_sequence_lengths(self) -> Integers:
        """Returns the number of tokens of prompt and response, for each response held here. [b]"""
        return self.sequence_lengths[self.held]

    @property
    def first_versions(self) -> Integers:
        """Returns the version of the policy that sampled each response's first token. [B]"""
        if not self.versions:
            return np.full(len(self.lengths), self.policy_version)
        return np.array([parts[0][0] for parts in self.versions])

    @property
    def token_versions(self) -> Integers:
        """Returns the version of the policy that sampled each sampled token held here. [M]"""
        if not self.versions:
            return np.full(len(self.rollout_logprobs), self.policy_version)
        parts = np.array([part for response in self.held for part in self.versions[response]]).reshape(-1, 2)
        return np.repeat(parts[:, 0], parts[:, 1])

    @property
    def held_num_sampled(self) -> Integers:
        """Returns the number of sampled tokens of each response held here. [b]"""
        return self.num_sampled[self.held]

    @property
    def prompt_lengths(self) -> Integers:
        """Returns the number of tokens of each response's prompt. [B]"""
        return np.array([len(prompt) for prompt in self.prompts], dtype=np.int64)[self.group_ids]

    @property
    def sequence_lengths(self) -> Integers:
        """Returns the number of tokens of prompt and response. [B]"""
        return self.prompt_lengths + self.lengths

    @property
    def restarts(self) -> bool:
        """Whether any response restarts with its own context; see TurnCounts.contexts."""
        return any(counts.contexts for counts in self.turn_counts)

    def parts(self, response: int) -> list["Part"]:
        """Returns the parts of a response, each with the context in which its tokens were sampled."""
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
        """Returns, for each response in a padded pass, the number of rows (one per part) and the tokens of the longest
        row, including the context. [B] each"""
        if not self.restarts:
            return np.ones(len(self.lengths), dtype=np.int64), self.sequence_lengths
        parts = [self.parts(response) for response in range(len(self.lengths))]
        longest = [max(part.context + part.end - part.begin for part in each) for each in parts]
        return np.array([len(each) for each in parts]), np.array(longest)

    @cached_property
    def sampled_places(self) -> Integers:
        """Returns the position of each token held here among the sampled ones; meaningless for given tokens. [N]"""
        return np.cumsum(self.sampled) - 1

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """Returns the reward of each response, including penalties. [B]"""
        return np.array([score.reward for score in self.scores], dtype=np.float64)

    def reward_terms(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Returns values and weights of the terms of each response's reward. A reward that is not a sum is a single
        term.

        A value is NaN if the response could not be scored. A term that a response's group lacks has value 0 and weight
        0. [terms, B] each, float64
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
        """Returns the sum of the rewards of each response's sampled turns; 0 if the environment does not reward turns.
        [B]"""
        return [counts.rewards or (0.0,) * counts.sampled for counts in self.turn_counts]

    @property
    def token_turns(self) -> Integers:
        """Returns the index of the sampled turn that contains each sampled token held here, from 0 in each response.
        [M]"""
        sampled = [[turn.num_tokens for turn in turns if turn.sampled] for turns in self.turns]
        return np.concatenate(
            [np.empty(0, dtype=np.int64), *(np.repeat(np.arange(len(sizes)), sizes) for sizes in sampled)]
        )

    @property
    def truncated(self) -> Bools:
        """Returns whether each response was cut at the maximum length. [B]"""
        return np.array([reason == "length" for reason in self.finish_reasons])


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a response that follows one context: the prompt, or tokens that were given as a new context."""

    begin: int
    """Position in the response of the part's first token after the context."""
    end: int
    """Position after its last token."""
    context: int
    """Number of tokens of the context. A context other than the prompt is in the response, directly before the part."""


def collate(
    groups: Sequence[RolloutGroup],
    *,
    problems: Sequence[int],
    responses: Sequence[str],
    scores: Sequence[Score],
    turns: Sequence[tuple[RecordedTurn, ...]] = (),
) -> StepRollouts:
    """Lays the groups' responses end to end. `problems` has one entry per group, the other arguments one per response.
    `turns` is empty if no turns are recorded."""
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
        versions=tuple(rollout.versions for rollout in rollouts) if rollouts[0].versions else (),
    )


def _experts(rollouts: Sequence[Rollout]) -> Experts | None:
    """Returns the experts of all tokens, laid end to end. A last token repeats those of the token before it."""
    known = [rollout.experts.astype(np.int16) for rollout in rollouts if rollout.experts is not None]
    assert len(known) in (0, len(rollouts)), "all responses are sampled alike"
    return np.concatenate([part for each in known for part in (each, each[-1:])]) if known else None


def counted(turns: Sequence[RecordedTurn]) -> TurnCounts:
    """Returns the counts of a response's turns."""
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
    """Joins several batches in their order, such as the shares of the ranks or rounds of sampling."""
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
        versions=tuple(versions for part in parts for versions in part.versions),
    )


def experts_of(parts: Sequence[Experts | None]) -> Experts | None:
    """Returns the experts of all parts, laid end to end; None if no part has any."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if known else None


def select(step: StepRollouts, groups: Sequence[int]) -> StepRollouts:
    """Returns the batch with only these groups, in this order."""
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
        versions=tuple(step.versions[response] for response in index) if step.versions else (),
    )


def keep(step: StepRollouts, places: Integers) -> StepRollouts:
    """Returns the batch with only some of the responses that this rank holds. `places`: positions of these responses
    among those held, in the new order."""
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
    """Returns the positions of the chosen responses' tokens, when responses of these lengths are laid end to end."""
    chosen = lengths[responses]
    first = (np.cumsum(lengths) - lengths)[responses]
    within: Integers = np.arange(chosen.sum()) - np.repeat(np.cumsum(chosen) - chosen, chosen)
    return within + np.repeat(first, chosen)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The tensors of one forward pass: b sequences of up to L tokens, with responses of up to T tokens, n of which were
    sampled.

    Given tokens are only in the input ids, like those of a prompt.
    """

    input_ids: Tensor
    """Prompts and responses. In a padded pass they are [b, L], with padding on the right, where causal attention never
    sees it. In a packed pass they are one row, [1, L], in which each prompt is followed by its responses. A part of a
    response with another context follows that context like a separate response, so there may be more rows than
    responses."""
    packed: tuple[tuple[int, ...], ...]
    """Layout of a packed row: the length of each prompt and of its responses; see Packing. Empty if each response has
    its own rows."""
    sources: Tensor
    """Positions in the flattened input ids whose hidden state predicts a sampled token, row by row. [n]"""
    host_sources: Tensor
    """Copy of `sources` on the host, readable without waiting for the device. [n]"""
    targets: Tensor
    """Ids of the sampled tokens. [n]"""
    tokens: Tensor
    """Positions of these tokens among the M sampled tokens that this rank holds. [n]"""
    response_mask: Tensor
    """1 on sampled tokens that count; 0 on given tokens and padding. [b, T]"""
    places: Tensor
    """Positions of the n tokens in the flattened [b * T]. [n]"""
    rollouts: Tensor
    """Index of each response in the step, on the host. [b]"""
    rollout_logprobs: Tensor
    """Logprobs of the sampled tokens from the engine that sampled them, nats. [n]"""
    rewards: Tensor
    """Reward of each response, on the host. [b]"""
    counts: bool
    """Whether the pass counts. If not, its only token is not part of the step and has weight 0; see Rows."""
    experts: Tensor | None = None
    """Experts to which each of the flattened input ids is routed, on the host. None lets the routers choose. [b * L,
    layers, experts per token]"""

    def look_up(self, values: Tensor) -> Tensor:
        """Selects this pass's values from the [M, ...] values of all sampled tokens held here, and returns them on the
        pass's device; 0 if the pass does not count. Does not wait for the device if the values are already there. [n,
        ...]"""
        values = values.to(self.tokens.device)
        return values[self.tokens] if self.counts else values.new_zeros(len(self.tokens), *values.shape[1:])

    def pick(self, values: Tensor) -> Tensor:
        """Returns the sampled tokens' values of [b, T] as [n]."""
        return values.flatten()[self.places]

    def spread(self, values: Tensor) -> Tensor:
        """Returns [n] values of the sampled tokens as [b, T], with 0 elsewhere. Differentiable."""
        return (
            values.new_zeros(self.response_mask.numel()).index_copy(0, self.places, values).view_as(self.response_mask)
        )


def microbatch(step: StepRollouts, rows: Rows, device: torch.device, *, packed: bool = False) -> Microbatch:
    """Returns the tensors of one forward pass, with its responses padded to one width or packed into one row.

    In a packed row, neighbours of one group share one copy of their prompt. This rank must hold the responses.
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
    # The last token of its context, which may precede another response, predicts a part's first token.
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
    """Returns the experts of the input ids of a pass. Padding gets the experts of the first token. A shared prompt gets
    those recorded with the first response after it. No response may have its own context here."""
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
"""Content of a pass that does not count: one token after one token."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The p parts of the b responses of a pass. Parts after prompts come first, in the order of the responses, so that
    neighbours of a group are adjacent."""

    responses: Integers
    """Index in the pass of each part's response. [p]"""
    groups: Integers
    """Index of the group whose prompt is the context; -1 if the context is in the response. [p]"""
    begins: Integers
    """Position of the first token in the response. [p]"""
    lengths: Integers
    """Number of tokens of the part, without the context. [p]"""
    contexts: Integers
    """Number of tokens of the context. [p]"""


def _parts(step: StepRollouts, index: Integers) -> _Parts:
    """Returns the parts of the responses with these indices in the step."""
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
    """The positions of a pass's p parts in its flattened input ids."""

    context_owners: Integers
    """For each part, the index of the part that directly follows its context. [p]"""
    first_tokens: Integers
    """Position of each part's first token. [p]"""
    size: int
    """Number of input ids, including padding."""


def _padded(parts: _Parts) -> _Layout:
    """Returns the layout with one row per part, each with its own copy of the context."""
    numbers, width = np.arange(len(parts.lengths)), int((parts.contexts + parts.lengths).max())
    return _Layout(numbers, numbers * width + parts.contexts, len(numbers) * width)


def _packed(parts: _Parts) -> _Layout:
    """Returns the layout of one row without padding. Neighbours from one group share the prompt, which is before the
    first of them."""
    owns_context = (np.diff(parts.groups, prepend=-1) != 0) | (parts.groups < 0)
    owners = np.maximum.accumulate(np.where(owns_context, np.arange(len(parts.lengths)), 0))
    ends = np.cumsum(parts.lengths + parts.contexts * owns_context)
    return _Layout(owners, ends - parts.lengths, int(ends[-1]))


def _families(parts: _Parts, layout: _Layout) -> Iterator[tuple[int, ...]]:
    """Yields, for each context of a packed row, its length, then the lengths of the parts after it."""
    for owner in np.unique(layout.context_owners):
        yield int(parts.contexts[owner]), *parts.lengths[layout.context_owners == owner].tolist()
