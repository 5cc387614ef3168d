"""Dynamic sampling: groups without variance are thrown away, and other prompts sampled in their place.

A step keeps the first groups, in the order of the prompts, whose scores differ. In which way they are sampled changes
how long that takes, and not which groups they are:

- `rounds`: as many prompts as groups are missing, all of them to the end, then again. Each round waits for its longest
  response, with fewer and fewer responses under way.
- `stream` (see `rpg/rollouts/stream.py`): a group is judged as soon as it has ended, and others begin at once, more of
  them than are missing. The step ends when the groups that rounds would have kept have ended; what was begun beyond
  them is thrown away unseen, and its prompts come again in the next step.

A stream could instead take the groups that end first, as slime and others do who sample asynchronously. It would wait
for no straggler, but the batch would then have more short responses than the policy gives, and fewer of the hard
prompts on which it thinks long. The order of the prompts knows nothing of lengths.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rpg.batches.batch import StepRollouts, join, select
from rpg.rewards import Score
from rpg.rewards.score import scores_vary

Sample = Callable[[int, int], StepRollouts]
"""(prompts of the step taken so far, prompts to take) -> their responses, scored."""


def refill(
    sample: Sample, *, groups: int, max_batches: int, surplus_tokens: int = 0, by_term: bool = False
) -> StepRollouts:
    """Samples, in rounds, until each of `groups` groups has scores that differ.

    Penalties on the length do not count: a group that is all wrong teaches nothing for being long. After `max_batches`
    rounds the empty places are filled with the first groups that were thrown away, behind the others, so that a step
    has the same number of groups, and every denominator its meaning, whatever was drawn.

    Args:
        sample: gives the next prompts' groups, in the order of the prompts.
        groups: of a step.
        max_batches: rounds at most.
        surplus_tokens: sampled for later prompts than any of these rounds asks for.
        by_term: see `scores_vary`.
    Returns:
        The batch; its `figures` count what was thrown away.
    Source: Yu 2025, arXiv:2503.14476, section 3.2; there the surplus of larger batches is thrown away too.
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
        # Groups that the reward fails on as a whole have no variance: what is kept would not show them.
        "reward/error_fraction": float(np.mean([score.error is not None for score in scores])),
    }
    return replace(whole, figures=figures)


def _varying(batch: StepRollouts, *, by_term: bool) -> np.ndarray:
    """Whether the scores of each group differ. [groups]"""
    scores: list[list[Score]] = [[] for _ in batch.prompts]
    for group, score in zip(batch.group_ids, batch.scores, strict=True):
        scores[group].append(score)
    return np.array([scores_vary(each, by_term=by_term) for each in scores])
