"""Which ranks sample: all, or of those that share a sampler the one that has it."""

from rpg.processes import ranks
from specs.machine.launch import engines_elsewhere
from specs.schema.rollout import Rollout


def has_sampler(rollout: Rollout) -> bool:
    """Whether this rank has a sampler of its own, and not that of a rank before it: on the same machine, or where the
    engines are elsewhere, on any."""
    place = ranks.rank() if engines_elsewhere() else ranks.local_rank()
    return place % rollout.ranks_per_sampler == 0


def sampling_ranks(rollout: Rollout) -> list[int]:
    """The ranks to which prompts are dealt, ascending. All ranks call it."""
    return [rank for rank, samples in enumerate(ranks.gather(has_sampler(rollout))) if samples]
