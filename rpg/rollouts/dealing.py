"""Which sampler has which prompt of a batch: each is to have as much to do as the others.

A sampler does not take over prompts from one that lags. That would save 1 to 4 % of the sampling time
(decision 31), and what is decoded together would depend on how long things take: no resume would be exact.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rpg.batches.batch import StepRollouts
from rpg.batches.packing_plan import Integers


class SeenLengths:
    """How long the responses to each problem were when it was last sampled, by which prompts are dealt.

    All ranks know the lengths of all responses, and so agree without talking. What is sampled follows from the prompts
    and their seeds alone, so that the deal changes how long sampling takes, and no response.
    """

    def __init__(self, num_problems: int) -> None:
        self._means = np.zeros(num_problems, dtype=np.float32)

    def note(self, rollouts: StepRollouts) -> None:
        """Notes the mean length of each group, tokens."""
        counts = np.bincount(rollouts.group_ids)
        self._means[list(rollouts.problems)] = np.bincount(rollouts.group_ids, weights=rollouts.lengths) / counts

    def deal(self, problems: Sequence[int], samplers: int) -> list[Integers]:
        """The places in `problems` that each sampler has, ascending: neighbours, until something is known of one of
        them.

        Then the longest first, each to the sampler that has the fewest tokens so far. A problem of which nothing is
        known counts as the mean of the others.
        """
        expected = self._means[list(problems)]
        known = expected > 0
        if not known.any():
            return np.array_split(np.arange(len(problems)), samplers)
        expected[~known] = expected[known].mean()
        shares: list[list[int]] = [[] for _ in range(samplers)]
        loads = np.zeros(samplers)
        for place in np.argsort(-expected, kind="stable").tolist():
            lightest = int(loads.argmin())
            shares[lightest].append(place)
            loads[lightest] += expected[place]
        return [np.array(sorted(share), dtype=np.int64) for share in shares]

    def state(self) -> Tensor:
        """State for a checkpoint, as `restore` takes it. [problems]"""
        return torch.from_numpy(self._means.copy())

    def restore(self, state: Tensor | None) -> None:
        """Goes back to what `state` gave; None, as in a checkpoint of one rank: none are."""
        self._means = np.zeros_like(self._means) if state is None else state.numpy().copy()
