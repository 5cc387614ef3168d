"""Distribution of a batch's prompts over the samplers, so that all have about equal work.

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
    """Lengths of the responses to each problem when it was last sampled. Prompts are distributed by these lengths.

    All ranks know the lengths of all responses, and so agree without communication. The samples depend only on the
    prompts and their seeds, so the distribution changes how long sampling takes, and no response.
    """

    def __init__(self, num_problems: int) -> None:
        self._means = np.zeros(num_problems, dtype=np.float32)

    def note(self, rollouts: StepRollouts) -> None:
        """Records the mean length of each group, in tokens."""
        counts = np.bincount(rollouts.group_ids)
        self._means[list(rollouts.problems)] = np.bincount(rollouts.group_ids, weights=rollouts.lengths) / counts

    def deal(self, problems: Sequence[int], samplers: Sequence[int]) -> list[Integers]:
        """Returns each rank's indices into `problems`, given its number of samplers. They are consecutive until a
        length is known.

        Then the longest come first, each to the rank whose samplers have the fewest tokens so far. A problem without a
        known length counts with the mean of the others. A rank with one sampler has its indices ascending; one with
        several has the longest first, and deals them in turn (`rpg/samplers/vllm/dedicated.py`).
        """
        expected = self._means[list(problems)]
        known = expected > 0
        if not known.any():
            ends = np.cumsum([len(part) for part in np.array_split(np.arange(len(problems)), sum(samplers))])
            return np.split(np.arange(len(problems)), np.append(0, ends)[np.cumsum(samplers)[:-1]])
        expected[~known] = expected[known].mean()
        shares: list[list[int]] = [[] for _ in samplers]
        loads = np.where(np.array(samplers) > 0, 0.0, np.inf)
        for place in np.argsort(-expected, kind="stable").tolist():
            lightest = int(loads.argmin())
            shares[lightest].append(place)
            loads[lightest] += expected[place] / samplers[lightest]
        ordered = (sorted(share) if count == 1 else share for share, count in zip(shares, samplers, strict=True))
        return [np.array(share, dtype=np.int64) for share in ordered]

    def state(self) -> Tensor:
        """Returns the state for a checkpoint, which `restore` accepts. [problems]"""
        return torch.from_numpy(self._means.copy())

    def restore(self, state: Tensor | None) -> None:
        """Restores a state. None, which the checkpoint of a single rank has, means that no lengths are known."""
        self._means = np.zeros_like(self._means) if state is None else state.numpy().copy()
