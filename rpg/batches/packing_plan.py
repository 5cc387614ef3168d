"""Plans which responses make up the forward passes of each rank.

Everything here depends only on the lengths and is the same on every rank, so the ranks agree without communication.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Indices = tuple[int, ...]

PROMPT_COPIES = 4
"""Bound on a packed row: the sum of its sequences, each with its own copy of the prompt, is at most this many token
budgets.

In each layer every response has a copy of its prompt's keys and values, kept for the backward pass. These copies take
1/30 (with grouped queries) to 1/10 of the other memory that a layer keeps per token.
"""

_MORE_TOKENS = 1.02
"""Largest allowed number of tokens in passes of even size, relative to passes that are as full as possible."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The responses of one forward pass."""

    rollouts: Indices

    @property
    def counts(self) -> bool:
        """Whether the pass has responses. A rank with fewer passes than another also runs empty ones, because all ranks
        must take part in each collective call."""
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
    """Plans each rank's passes over a minibatch. Ranks get equal shares of the work, and the responses of a pass have
    similar lengths.

    Every rank gets the same number of passes: a rank with fewer of its own adds passes that do not count.

    Args:
        lengths: tokens of the longest row of each of the step's responses: prompt and response, unless a part of the
            response has another context. [B]
        rollouts: the minibatch, as indices into `lengths`.
        max_tokens: bound on rows x longest row. A longer response gets its own pass.
        attention: the work of n tokens is n + attention n^2, see `Learner.attention_share`.
        rows: number of rows of each response; one each if omitted. [B]
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
    """Plans passes of one row each. Responses are grouped by prompt, so that a prompt appears once for all its
    responses.

    Deals whole groups to the ranks, or single responses if the busiest rank then has less work.

    Args:
        prompts: tokens of each response's prompt. [B]
        responses: tokens of each response. [B]
        groups: group of each response; a group has one prompt. [B]
        rollouts: the minibatch, as indices into these arrays.
        max_tokens: bound on the tokens of a row; PROMPT_COPIES times that bounds its tokens counted with one prompt per
            response. A response that is longer with its prompt gets its own pass.
        attention: as in `plan_padded`; a response attends to its prompt as well.
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
    """Returns the work of a piece of a sequence that attends to the `behind` tokens before it. The unit is the cost of
    a token without attention."""
    return tokens + attention * tokens * (tokens + 2 * behind)


def _deal(pieces: Sequence[tuple[Indices, float]], ranks: int) -> list[list[int]]:
    """Distributes pieces, the largest first, each to the rank with the least work so far."""
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
    """Fills passes. The group of the longest response comes first, to show early whether memory suffices. A group may
    be divided."""
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
    """Returns each rank's passes. They have similar sizes, and are as few as the busiest rank needs.

    A last pass of a few responses wastes a GPU: the host needs as long to launch its kernels as those of a full pass.

    Args:
        fills: one function per rank: bound on tokens -> the rank's passes.
        tokens: returns the tokens of a pass.
    """
    full = [fill(max_tokens) for fill in fills]
    most = max(map(len, full))
    if most > 1:
        full = [_shortest(*each, tokens, max_tokens, most) for each in zip(fills, full, strict=True)]
    return [[Rows(each) for each in passes] + [IDLE] * (most - len(passes)) for passes in full]


def _shortest(
    fill: _Fill, passes: list[Indices], tokens: Callable[[Indices], int], max_tokens: int, most: int
) -> list[Indices]:
    """Returns at most `most` passes, with the smallest bound on their size that bisection finds to within a 64th of
    `max_tokens`.

    A divided group repeats its prompt: a plan with many more tokens than the full `passes` is rejected."""
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
    """Returns the responses of each group, in the given order."""
    members: dict[int, list[int]] = {}
    for index in rollouts:
        members.setdefault(int(groups[index]), []).append(index)
    return [tuple(indices) for indices in members.values()]


def _longest_first(lengths: Integers, rollouts: Iterable[int]) -> list[int]:
    return sorted(rollouts, key=lambda index: (-int(lengths[index]), index))
