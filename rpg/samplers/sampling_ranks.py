"""The samplers of each rank: one, several, or none if the rank shares the sampler of an earlier rank."""

from rpg.processes import ranks
from specs.machine.launch import engines_elsewhere
from specs.schema.rollout import Rollout


def own_samplers(rollout: Rollout) -> list[int]:
    """Returns the indices of this rank's samplers among those of its machine or, if engines are on other machines,
    among those of the run.

    Args:
        rollout: the section as a machine has it, see `Experiment.sampling`.
    """
    rank = ranks.rank() if engines_elsewhere() else ranks.local_rank()
    return [number for number, host in enumerate(rollout.hosts(ranks_together())) if host == rank]


def ranks_together() -> int:
    """Returns the number of ranks that samplers are distributed over: those of this machine, or all ranks if engines
    are on other machines."""
    return ranks.world_size() if engines_elsewhere() else ranks.on_this_machine()


def samplers_of_ranks(rollout: Rollout) -> list[int]:
    """Returns how many samplers each rank has. All ranks call it."""
    return ranks.gather(len(own_samplers(rollout)))
