"""Chooses a process's device and its number of threads."""

import torch

from rpg.processes import ranks
from specs.errors import Issue, SpecError
from specs.machine.parent import own_threads
from specs.schema.execution import Resources


def choose_device(resources: Resources) -> torch.device:
    """Returns the device that the spec asks for. With auto, a GPU if the machine has one.

    Raises:
        SpecError: the spec asks for a GPU, but the machine has none.
    """
    wanted = resources.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if issue := no_gpu(resources):
        raise SpecError(issue)
    device = torch.device("cuda", ranks.local_rank())
    torch.cuda.set_device(device)
    return device


def device_at_hand(resources: Resources) -> torch.device:
    """Returns the spec's device, or the CPU if the machine has no GPU. For work that a CPU does equally well."""
    return choose_device(resources if resources.device == "cpu" else resources.model_copy(update={"device": "auto"}))


def no_gpu(resources: Resources) -> Issue | None:
    """Returns an issue that says that the spec asks for a GPU but the machine has none."""
    if resources.device != "cuda" or torch.cuda.is_available():
        return None
    return Issue("there is no GPU here", path=("resources", "device"), given="cuda", allowed="auto, cpu")


def use_threads(resources: Resources, *, processes: int = 1) -> None:
    """Sets this process's number of threads: as the spec or OMP_NUM_THREADS says, else its share of the machine's
    cores.

    Args:
        resources: the spec's resources.
        processes: number of this run's processes that compute on this machine at the same time.
    """
    torch.set_num_threads(own_threads(resources.threads, processes))
