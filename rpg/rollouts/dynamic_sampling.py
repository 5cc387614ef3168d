"""Dynamic sampling: groups whose scores are all equal are dropped, and other prompts are sampled in their place.

A step keeps the first groups, in the order of the prompts, whose scores differ. The way of sampling changes how long
that takes, and not which groups are kept:

- `rounds`: samples as many prompts as groups are missing, all of them to the end, and repeats. Each round waits for its
  longest response, with fewer and fewer responses running.
- `stream` (see `rpg/rollouts/stream.py`): judges a group as soon as it has ended, and starts others at once, more of
  them than are missing. The step ends when the groups that rounds would have kept have ended. Groups started beyond
  them are dropped unseen, and their prompts come again in the next step.

A stream could instead take the groups that end first, as slime and other asynchronous samplers do. It would wait for no
straggler, but the batch would then have more short responses than the policy gives, and fewer of the hard prompts on
which it thinks long. The order of the prompts does not depend on lengths.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rpg.batches.batch import StepRollouts, join, select
from rpg.rewards import Score
from rpg.rewards.score import scores_vary

Sample = Callable[[int, int], StepRollouts]
"""Function (number of prompts of the step used so far, number of prompts to sample) -> their scored responses."""


def refill(
    sample: Sample, *, groups: int, max_batches: int, surplus_tokens: int = 0, by_term: bool = False
) -> StepRollouts:
    """Samples in rounds until there are `groups` groups in which the scores differ.

    Penalties on the length do not count: an all-wrong group has nothing to teach, even if its lengths differ. After
    `max_batches` rounds the empty places are filled with the first dropped groups, after the others. So every step has
    the same number of groups, and every denominator keeps its meaning.

    Args:
        sample: returns the groups of the next prompts, in the order of the prompts.
        groups: number of groups of a step.
        max_batches: most rounds.
        surplus_tokens: tokens sampled for prompts beyond those that these rounds use.
        by_term: see `scores_vary`.
    Returns:
        The batch; its `figures` count the dropped groups and tokens.
    Source: Yu 2025, arXiv:2503.14476, section 3.2; there the surplus of larger batches is dropped too.
    """
    kept: list[StepRollouts] = []
    dropped: list[StepRollouts] = []
    num_kept = taken = 0
    scores: list[Score] = []
    for _ in range(max_batches):
        missing = groups - num_kept
        batch = sample(taken, missing)
        taken += missing
        scores += batch.scores
        varying = _varying(batch, by_term=by_term)
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
        "dynamic_sampling/reward_mean": float(np.mean([score.earned for score in scores])),
        "dynamic_sampling/surplus_tokens": float(surplus_tokens),
        # If the reward fails on whole groups, these have no variance, and the kept groups would not show the failures.
        "reward/error_fraction": float(np.mean([score.error is not None for score in scores])),
    }
    return replace(whole, figures=figures)


def _varying(batch: StepRollouts, *, by_term: bool) -> np.ndarray:
    """Returns whether the scores of each group differ. [groups]"""
    scores: list[list[Score]] = [[] for _ in batch.prompts]
    for group, score in zip(batch.group_ids, batch.scores, strict=True):
        scores[group].append(score)
    return np.array([scores_vary(each, by_term=by_term) for each in scores])
