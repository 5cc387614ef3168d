"""Out-of-memory errors of a sampler. Their remedies differ from those for the learner."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specs.errors import SpecError
from specs.machine.exit_cause import cause_of
from specs.schema.rollout import Rollout


class SamplerOutOfMemoryError(RuntimeError):
    """Error raised if a sampler ran out of memory on a GPU or the host."""


@contextmanager
def memory_of_sampler(rollout: Rollout, device: torch.device) -> Iterator[None]:
    """Attributes out-of-memory errors in the block to the sampler.

    Raises:
        SamplerOutOfMemoryError: memory ran out; the message names the keys that help.
    """
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        if cause_of(error) != "out_of_memory":
            raise
        keys = " or ".join(rollout.keys_to_lower(on_cpu=device.type == "cpu"))
        last_line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise SamplerOutOfMemoryError(f"the sampler ran out of memory; lower {keys}: {last_line}") from error
