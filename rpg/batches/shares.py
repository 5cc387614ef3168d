"""Distributes a step's responses: each moves from the rank that sampled it to the rank that trains on it.

A response is sampled on the rank that got its prompt. Minibatches follow the order of the prompts, and each is dealt to
all ranks in equal parts of its tokens. If each rank trained on the responses that it sampled, the other ranks would be
idle during a minibatch of one rank's prompts. So a response's tokens and text go to the rank that trains on it, and
nowhere else. That rank also has its part of the token table and writes its rows. A response on which no rank trains
stays.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from rpg.batches.batch import Experts, StepRollouts, experts_of, keep
from rpg.batches.packing_plan import Integers
from rpg.messages import decoded, encoded
from rpg.processes import ranks

Value = TypeVar("Value", bound=np.generic)


def without_contents(step: StepRollouts) -> StepRollouts:
    """Returns the part of a share that other ranks get: length, score and group of each response. They know the
    prompts."""
    return replace(keep(step, np.empty(0, dtype=np.int64)), prompts=())


def holding(step: StepRollouts, shares: Sequence[StepRollouts]) -> StepRollouts:
    """Returns the step with this rank holding all responses of these shares. No response is in two shares."""
    parts = [without_contents(step), *shares]
    together = replace(
        step,
        held=np.concatenate([part.held for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        sampled=np.concatenate([part.sampled for part in parts]),
        rollout_logprobs=np.concatenate([part.rollout_logprobs for part in parts]),
        responses=tuple(text for part in parts for text in part.responses),
        turns=tuple(turns for part in parts for turns in part.turns),
        experts=experts_of([part.experts for part in parts]),
    )
    return keep(together, np.argsort(together.held))


def hand_over(step: StepRollouts, trainers: Integers, *, experts: bool = False) -> StepRollouts:
    """Returns the step with each response held by the rank that trains on it. All ranks call it.

    Args:
        trainers: that rank, for each response; -1 if none, so that the response stays where it is. [B]
        experts: whether to transfer the tokens' experts too.
    """
    if ranks.world_size() == 1:
        return step
    targets = np.where(trainers < 0, ranks.rank(), trainers)[step.held]
    shares = [keep(step, np.flatnonzero(targets == rank)) for rank in range(ranks.world_size())]
    texts = [[text.encode() for text in share.responses] for share in shares]
    arrived = replace(
        step,
        held=_all_to_all([share.held for share in shares]),
        token_ids=_all_to_all([share.token_ids for share in shares]),
        sampled=_all_to_all([share.sampled.view(np.uint8) for share in shares]).view(np.bool_),
        rollout_logprobs=_all_to_all([share.rollout_logprobs for share in shares]),
        responses=tuple(text.decode() for text in _bytes_to_all(texts)),
        turns=tuple(
            turns for each in _bytes_to_all([[encoded(share.turns)] for share in shares]) for turns in decoded(each)
        ),
        experts=_experts_to_all([share.experts for share in shares]) if experts else None,
    )
    return holding(step, [arrived])


def _experts_to_all(shares: Sequence[Experts | None]) -> Experts | None:
    """Exchanges experts. Returns those of the tokens that the other ranks have for this rank."""
    return experts_of([decoded(each) for each in _bytes_to_all([[encoded(share)] for share in shares])])


def _bytes_to_all(contents: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Sends each rank its contents. Returns the contents that all ranks have for this rank."""
    ends = np.cumsum(_all_to_all([np.array(list(map(len, each)), dtype=np.int64) for each in contents]))
    written = _all_to_all([np.frombuffer(b"".join(each), dtype=np.uint8) for each in contents]).tobytes()
    return [written[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _all_to_all(arrays: Sequence[npt.NDArray[Value]]) -> npt.NDArray[Value]:
    """See `ranks.all_to_all`."""
    received: npt.NDArray[Value] = ranks.all_to_all([torch.tensor(array) for array in arrays]).numpy()
    return received
