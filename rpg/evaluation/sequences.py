"""Computes logprobs of given tokens with a learner's passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rpg.learner.passes import Passes
from rpg.messages import message
from rpg.processes import ranks
from rpg.types import Rollout

_IDLE = torch.tensor([[0, 0]])
"""Input of a pass that a rank runs only because another rank still has sequences."""


@message
@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens of which some are scored."""

    token_ids: tuple[int, ...]
    scored: tuple[tuple[int, int], ...]
    """Ranges [begin, end) of the tokens whose logprobs are wanted. The first token of a sequence has none."""

    @property
    def num_scored(self) -> int:
        """Number of scored tokens."""
        return sum(end - begin for begin, end in self.scored)


def sequences_of(prompt: Sequence[int], rollout: Rollout) -> tuple[TokenSequence, ...]:
    """Returns a response, after its prompt, as a sequence in which sampled tokens are scored. Each restart of the
    context begins another sequence."""
    found, ids, scored = list[TokenSequence](), list(prompt), list[tuple[int, int]]()
    for turn in rollout.turns:
        if turn.restart:
            found.append(TokenSequence(tuple(ids), tuple(scored)))
            ids, scored = [], []
        if turn.sampled:
            scored.append((len(ids), len(ids) + len(turn.token_ids)))
        ids += turn.token_ids
    found.append(TokenSequence(tuple(ids), tuple(scored)))
    return tuple(each for each in found if each.scored)


def decode_sequences(plain: Sequence[Any]) -> tuple[TokenSequence, ...]:
    """Builds sequences from token ids and scored ranges, as they are stored in JSON."""
    return tuple(TokenSequence(tuple(ids), tuple((begin, end) for begin, end in scored)) for ids, scored in plain)


@torch.no_grad()
def token_logprobs_of(
    sequences: Sequence[TokenSequence], passes: Passes, device: torch.device, *, most_tokens: int
) -> list[NDArray[np.float64]]:
    """Returns the logprobs of each sequence's scored tokens at temperature 1, nats. All ranks call it and share the
    work.

    Args:
        most_tokens: tokens of a pass, padding included; a longer sequence has its own pass.
    """
    own, world = list(range(ranks.rank(), len(sequences), ranks.world_size())), ranks.world_size()
    batches = list(_batches(own, sequences, most_tokens))
    made: dict[int, NDArray[np.float64]] = {}
    for number in range(int(ranks.largest(torch.tensor(len(batches))))):
        if number < len(batches):
            made |= _of_batch(batches[number], sequences, passes, device)
        else:  # at ZeRO 3 a pass needs all ranks
            passes.given(_IDLE.to(device), torch.zeros(1, dtype=torch.int64, device=device), _IDLE[0, 1:].to(device))
    parts = ranks.gather([made[index] for index in own])
    return [parts[index % world][index // world] for index in range(len(sequences))]


def _batches(chosen: Sequence[int], sequences: Sequence[TokenSequence], most_tokens: int) -> Iterator[list[int]]:
    """Yields the indices of the sequences of each pass: sequences of similar length, the longest first."""
    batch: list[int] = []
    for index in sorted(chosen, key=lambda index: -len(sequences[index].token_ids)):
        if batch and (len(batch) + 1) * len(sequences[batch[0]].token_ids) > most_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _of_batch(
    batch: Sequence[int], sequences: Sequence[TokenSequence], passes: Passes, device: torch.device
) -> dict[int, NDArray[np.float64]]:
    chosen = [sequences[index] for index in batch]
    width = max(len(each.token_ids) for each in chosen) - 1  # a last token is only predicted
    input_ids = np.zeros((len(batch), width), dtype=np.int64)
    places, wanted = list[int](), list[int]()
    for row, each in enumerate(chosen):
        shown = each.token_ids[:width]
        input_ids[row, : len(shown)] = shown
        for begin, end in each.scored:
            places += range(row * width + begin - 1, row * width + end - 1)
            wanted += each.token_ids[begin:end]
    targets = torch.tensor(wanted, dtype=torch.int64, device=device)
    sources = torch.tensor(places, dtype=torch.int64, device=device)
    logprobs = passes.given(torch.from_numpy(input_ids).to(device), sources, targets).double().cpu().numpy()
    ends = np.cumsum([0, *(each.num_scored for each in chosen)]).tolist()
    return {index: logprobs[begin:end] for index, (begin, end) in zip(batch, pairwise(ends), strict=True)}
