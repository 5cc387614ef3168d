"""Which responses make up the forward passes of each rank.

Everything here follows from the lengths alone and is the same on every rank, so that the ranks agree without talking.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Indices = tuple[int, ...]

PROMPT_COPIES = 4
"""A packed row's sequences, each counted with a prompt of its own, add up to at most this many times the token budget.

In each layer every response has a copy of its prompt's keys and values, kept for the backward pass. They take 1/30
(with grouped queries) to 1/10 of what else a layer keeps of a token.
"""

_MORE_TOKENS = 1.02
"""Times as many tokens as passes that are as full as can be: so many passes that are alike may have."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Which responses make up one forward pass."""

    rollouts: Indices

    @property
    def counts(self) -> bool:
        """Whether it has responses. A rank with fewer passes than another makes some of none, since all ranks must take
        part in each collective call."""
        return bool(self.rollouts)


IDLE = Rows(())
_Fill = Callable[[int], list[Indices]]


def plan_padded(
    lengths: Integers,
    rollouts: Sequence[int],
    *,
    ranks: int,
    max_tokens: int,
    attention: float = 0.0,
    rows: Integers | None = None,
) -> list[list[Rows]]:
    """Each rank's passes over a minibatch: an equal share of the work, in passes of neighbours in length.

    Every rank gets the same number of passes; one with fewer of its own fills up with passes that do not count.

    Args:
        lengths: tokens of the longest row of each of the step's responses, which is of its prompt and itself unless a
            part of it has another context. [B]
        rollouts: the minibatch, as indices into `lengths`.
        max_tokens: bound on rows x longest row. A response longer than that is a pass of its own.
        attention: the work of n tokens is n + attention n^2, see `Learner.attention_share`.
        rows: of each response; left out: one. [B]
    """
    counts = np.ones_like(lengths) if rows is None else rows
    work = [((index,), int(counts[index]) * _work(int(lengths[index]), attention)) for index in rollouts]
    fills = [partial(_fill_padded, lengths, counts, share) for share in _deal(work, ranks)]

    def tokens(indices: Indices) -> int:
        return int(counts[list(indices)].sum() * lengths[list(indices)].max())

    return _evened(fills, tokens, max_tokens)


def plan_packed(
    prompts: Integers,
    responses: Integers,
    groups: Integers,
    rollouts: Sequence[int],
    *,
    ranks: int,
    max_tokens: int,
    attention: float = 0.0,
) -> list[list[Rows]]:
    """Plans passes of one row, which hold a prompt once for all its responses: they stand group by group.

    Whole groups are dealt to the ranks, or single responses where that leaves the fullest rank with less work.

    Args:
        prompts: tokens of each response's prompt. [B]
        responses: tokens of each response. [B]
        groups: which group each response belongs to; the prompt is the group's. [B]
        rollouts: the minibatch, as indices into these.
        max_tokens: bound on the tokens of a row, and PROMPT_COPIES times that on what they would be with a prompt for
            each response. A response that is longer with its prompt is a pass of its own.
        attention: as above; a response attends to its prompt as well.
    """

    def work(share: Iterable[int]) -> float:
        prompt_of_group = {int(groups[index]): int(prompts[index]) for index in share}
        of_prompts = sum(_work(length, attention) for length in prompt_of_group.values())
        return of_prompts + sum(_work(int(responses[each]), attention, behind=int(prompts[each])) for each in share)

    lengths = prompts + responses
    singly = [((index,), work((index,))) for index in rollouts]
    whole = [(members, work(members)) for members in _members(groups, rollouts)]
    ways = (_deal(whole, ranks), _deal(singly, ranks))
    shares = min(ways, key=lambda way: max(map(work, way)))
    fills = [partial(_fill_packed, lengths, responses, _members(groups, share)) for share in shares]

    def tokens(indices: Indices) -> int:
        prompt_of_group = {int(groups[index]): int(prompts[index]) for index in indices}
        return sum(prompt_of_group.values()) + int(responses[list(indices)].sum())

    return _evened(fills, tokens, max_tokens)


def _work(tokens: int, attention: float, *, behind: int = 0) -> float:
    """Work of a piece of a sequence, `behind` so many tokens that it attends to, in units of what a token costs without
    attention."""
    return tokens + attention * tokens * (tokens + 2 * behind)


def _deal(pieces: Sequence[tuple[Indices, float]], ranks: int) -> list[list[int]]:
    """Pieces of so much work, the largest first, each to the rank that has the least so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for piece, work in sorted(pieces, key=lambda each: (-each[1], each[0])):
        lightest = loads.index(min(loads))
        shares[lightest].extend(piece)
        loads[lightest] += work
    return shares


def _fill_padded(lengths: Integers, rows: Integers, share: list[int], max_tokens: int) -> list[Indices]:
    passes: list[list[int]] = []
    for index in _longest_first(lengths, share):
        if passes and int(lengths[passes[-1][0]]) * int(rows[[*passes[-1], index]].sum()) <= max_tokens:
            passes[-1].append(index)
        else:
            passes.append([index])
    return [tuple(each) for each in passes]


def _fill_packed(lengths: Integers, responses: Integers, groups: list[Indices], max_tokens: int) -> list[Indices]:
    """The group of the longest response first, which shows at once whether memory holds; a group may be divided."""
    passes: list[list[int]] = []
    tokens = with_prompts = 0
    ordered = [_longest_first(responses, members) for members in groups]
    for members in sorted(ordered, key=lambda each: (-int(lengths[each[0]]), each)):
        tokens += int(lengths[members[0]] - responses[members[0]])
        for index in members:
            tokens += int(responses[index])
            with_prompts += int(lengths[index])
            if passes and tokens <= max_tokens and with_prompts <= PROMPT_COPIES * max_tokens:
                passes[-1].append(index)
            else:
                passes.append([index])
                tokens = with_prompts = int(lengths[index])
    return [tuple(each) for each in passes]


def _evened(fills: Sequence[_Fill], tokens: Callable[[Indices], int], max_tokens: int) -> list[list[Rows]]:
    """Each rank's passes, in the fewest that the busiest rank needs, and these about alike: of a last pass of a few
    responses a GPU makes little, since the host takes as long to start its kernels as those of a full one.

    Args:
        fills: of each rank, its passes by a bound on their tokens.
        tokens: of a pass.
    """
    full = [fill(max_tokens) for fill in fills]
    most = max(map(len, full))
    if most > 1:
        full = [_shortest(*each, tokens, max_tokens, most) for each in zip(fills, full, strict=True)]
    return [[Rows(each) for each in passes] + [IDLE] * (most - len(passes)) for passes in full]


def _shortest(
    fill: _Fill, passes: list[Indices], tokens: Callable[[Indices], int], max_tokens: int, most: int
) -> list[Indices]:
    """At most `most` passes, by the smallest bound that a bisection to a 64th of `max_tokens` finds. Groups that are
    divided have their prompt several times: a plan with many more tokens than `passes`, the full ones, is not taken."""
    low, high = max_tokens // (most + 1), max_tokens
    bearable = _MORE_TOKENS * sum(map(tokens, passes))
    while high - low > max(1, max_tokens // 64):
        middle = (low + high) // 2
        shorter = fill(middle)
        if len(shorter) > most or sum(map(tokens, shorter)) > bearable:
            low = middle
        else:
            passes, high = shorter, middle
    return passes


def _members(groups: Integers, rollouts: Iterable[int]) -> list[Indices]:
    """The responses of each group, in the order given."""
    members: dict[int, list[int]] = {}
    for index in rollouts:
        members.setdefault(int(groups[index]), []).append(index)
    return [tuple(indices) for indices in members.values()]


def _longest_first(lengths: Integers, rollouts: Iterable[int]) -> list[int]:
    return sorted(rollouts, key=lambda index: (-int(lengths[index]), index))
