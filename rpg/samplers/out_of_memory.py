"""Memory that runs out in a sampler: what helps there is not what helps in the learner."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rpg.processes.exit_cause import cause_of
from specs.errors import SpecError
from specs.schema.rollout import Rollout, VllmRollout


class SamplerOutOfMemoryError(RuntimeError):
    """A sampler ran out of memory, of a GPU or the host."""


@contextmanager
def memory_of_sampler(rollout: Rollout, device: str | torch.device) -> Iterator[None]:
    """Memory that runs out within is the sampler's.

    Raises:
        SamplerOutOfMemoryError: it ran out; says which keys help.
    """
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        if cause_of(error) != "out_of_memory":
            raise
        keys = " or ".join(keys_to_lower(rollout, on_cpu=torch.device(device).type == "cpu"))
        said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise SamplerOutOfMemoryError(f"the sampler ran out of memory; lower {keys}: {said}") from error


def keys_to_lower(rollout: Rollout, *, on_cpu: bool) -> list[str]:
    """Paths in the spec that leave the sampler more memory with a smaller value. None of them changes what is asked."""
    keys, beside_learner = ["rollout.max_concurrent"], rollout.max_staleness > 0
    if isinstance(rollout, VllmRollout):
        keys.append("rollout.cpu_cache_gib" if on_cpu else "rollout.memory_fraction")
        beside_learner = beside_learner and rollout.placement == "colocated"
    return [*keys, "training.microbatch_tokens"] if beside_learner else keys
