"""Ranks that sample: all, or among those that share a sampler the one that holds it."""

from rpg.processes import ranks
from specs.machine.launch import engines_elsewhere
from specs.schema.rollout import Rollout


def has_sampler(rollout: Rollout) -> bool:
    """Returns whether this rank has its own sampler, and does not share one of an earlier rank: on the same machine, or
    on any machine if the engines are on other ones."""
    place = ranks.rank() if engines_elsewhere() else ranks.local_rank()
    return place % rollout.ranks_per_sampler == 0


def sampling_ranks(rollout: Rollout) -> list[int]:
    """Returns the ranks that get prompts, ascending. All ranks call it."""
    return [rank for rank, samples in enumerate(ranks.gather(has_sampler(rollout))) if samples]
