"""Samplers of each rank: one, several, or none if the rank shares that of an earlier one."""

from rpg.processes import ranks
from specs.machine.launch import engines_elsewhere
from specs.schema.rollout import Rollout


def own_samplers(rollout: Rollout) -> list[int]:
    """Returns the numbers of this rank's samplers among those of its machine, or among those of the run if engines are
    on other machines.

    Args:
        rollout: the section as a machine has it, see `Experiment.sampling`.
    """
    rank = ranks.rank() if engines_elsewhere() else ranks.local_rank()
    return [number for number, host in enumerate(rollout.hosts(ranks_together())) if host == rank]


def ranks_together() -> int:
    """Returns the number of ranks that samplers are spread over: those of this machine, or all if engines are on other
    machines."""
    return ranks.world_size() if engines_elsewhere() else ranks.on_this_machine()


def samplers_of_ranks(rollout: Rollout) -> list[int]:
    """Returns how many samplers each rank has. All ranks call it."""
    return ranks.gather(len(own_samplers(rollout)))
