"""Dynamic sampling: groups without variance are thrown away, and other prompts sampled in their place."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rpg.batches.batch import StepRollouts, join, select

Sample = Callable[[int, int], StepRollouts]
"""(prompts of the step taken so far, prompts to take) -> their responses, scored."""


def refill(sample: Sample, *, groups: int, max_batches: int) -> StepRollouts:
    """Samples until each of `groups` groups has scores that differ.

    Penalties on the length do not count: a group that is all wrong teaches nothing for being long. After `max_batches`
    rounds the empty places are filled with the first groups that were thrown away, behind the others, so that a step
    has the same number of groups, and every denominator its meaning, whatever was drawn.

    Returns:
        The batch; its `figures` count what was thrown away.
    Source: Yu 2025, arXiv:2503.14476, section 3.2; there the surplus of larger batches is thrown away too.
    """
    kept: list[StepRollouts] = []
    dropped: list[StepRollouts] = []
    num_kept = taken = 0
    scores: list[float] = []
    for _ in range(max_batches):
        missing = groups - num_kept
        batch = sample(taken, missing)
        taken += missing
        scores += [score.value for score in batch.scores]
        varying = _varying(batch)
        kept.append(select(batch, np.flatnonzero(varying).tolist()))
        dropped.append(select(batch, np.flatnonzero(~varying).tolist()))
        num_kept += int(varying.sum())
        if num_kept == groups:
            break
    without_variance = join(dropped)
    filling = groups - num_kept
    whole = join([*kept, select(without_variance, range(filling))])
    lost = select(without_variance, range(filling, len(without_variance.prompts)))
    figures = {
        "dynamic_sampling/batches": float(len(kept)),
        "dynamic_sampling/dropped_groups": float(len(lost.prompts)),
        "dynamic_sampling/dropped_tokens": float(lost.num_sampled.sum()),
        "dynamic_sampling/filled_groups": float(filling),
        "dynamic_sampling/reward_mean": float(np.mean(scores)),
    }
    return replace(whole, figures=figures)


def _varying(batch: StepRollouts) -> np.ndarray:
    """Of each group: whether its scores differ. [groups]"""
    values = np.array([score.value for score in batch.scores])
    return np.array([np.ptp(values[batch.group_ids == group]) > 0 for group in range(len(batch.prompts))])
