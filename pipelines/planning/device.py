"""The device that a memory estimate is compared with: the spec's GPU, else this machine's, else an H100."""

import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from rpg.base.shape import ModelShape
from specs.machine.cards import CARDS, H100
from specs.schema.experiment import Experiment

LARGE = 50_000_000
"""Number of parameters from which a model is assumed to be trained on a GPU, even if this machine has none."""
NAMED_BY_SPEC = "resources.memory_gib"


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a rank computes on."""

    name: str
    """The GPU's name; NAMED_BY_SPEC if the spec gives only the memory."""
    memory_gib: float
    """All memory that a process can have, as the driver reports it."""


KNOWN_GPUS = tuple(
    Device(card.name, card.memory_gib) for card in CARDS if card.name not in ("an L40", "an H100 on PCIe")
)
"""GPUs in increasing order of memory, one for each size."""
ASSUMED = Device(H100.name, H100.memory_gib)
"""The GPU if nothing names one; the estimate of GPU hours assumes the same."""


def device_of(experiment: Experiment, shape: ModelShape) -> Device | None:
    """Returns the device of the experiment's ranks. None for a CPU, and for small models if no GPU is known."""
    resources = experiment.resources
    if resources.memory_gib:
        return Device(NAMED_BY_SPEC, resources.memory_gib)
    if resources.device == "cpu":
        return None
    if experiment.launcher.type == "local" and (here := smallest_gpu()):
        return here
    return ASSUMED if shape.parameters >= LARGE or resources.device == "cuda" else None


def on_device(experiment: Experiment, device: Device | None) -> Experiment:
    """Returns the experiment with the device's memory as its `resources.memory_gib`, of which an engine
    takes its fraction."""
    if device is None:
        return experiment
    resources = experiment.resources.model_copy(update={"memory_gib": device.memory_gib})
    return experiment.model_copy(update={"resources": resources})


@cache
def smallest_gpu() -> Device | None:
    """Returns the memory of this machine's smallest GPU, by nvidia-smi. None if it has no GPU."""
    program = shutil.which("nvidia-smi")
    if not program:
        return None
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        listing = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, check=True).stdout
        rows = [line.rpartition(",") for line in listing.splitlines() if line.strip()]
        gpus = [Device(name.strip(), round(int(mebibytes) / 1024, 1)) for name, _, mebibytes in rows]
        return min(gpus, key=lambda gpu: gpu.memory_gib, default=None)
    return None
