"""Distribution of a batch's prompts over the samplers, with about equal work for each.

A sampler does not take over prompts from one that lags. That would save 1 to 4 % of the sampling time (decision 31),
but which responses are decoded together would depend on timing, and no resume would be exact.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rpg.batches.batch import StepRollouts
from rpg.batches.packing_plan import Integers


class SeenLengths:
    """Lengths of the responses to each problem when it was last sampled; prompts are distributed by them.

    All ranks know the lengths of all responses, and so agree without communication. The samples depend only on the
    prompts and their seeds, so the distribution changes how long sampling takes, and no response.
    """

    def __init__(self, num_problems: int) -> None:
        self._means = np.zeros(num_problems, dtype=np.float32)

    def note(self, rollouts: StepRollouts) -> None:
        """Records the mean length of each group, in tokens."""
        counts = np.bincount(rollouts.group_ids)
        self._means[list(rollouts.problems)] = np.bincount(rollouts.group_ids, weights=rollouts.lengths) / counts

    def deal(self, problems: Sequence[int], samplers: int) -> list[Integers]:
        """Returns the indices in `problems` for each sampler, ascending. They are consecutive until a length is known.

        Then the longest come first, each to the sampler that has the fewest tokens so far. A problem without a known
        length counts with the mean of the others.
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
        """Returns the state for a checkpoint, which `restore` takes. [problems]"""
        return torch.from_numpy(self._means.copy())

    def restore(self, state: Tensor | None) -> None:
        """Restores a state; None, which a checkpoint of one rank has, means that no lengths are known."""
        self._means = np.zeros_like(self._means) if state is None else state.numpy().copy()
