"""Binds a process to the CPUs beside its GPU.

A machine with several GPUs has several NUMA nodes. A rank whose threads run on another node than its GPU copies through
the link between the nodes. The call comes before torch starts threads, which inherit the CPUs.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_BOUND = "RPG_BOUND_TO_CPUS"
"""Environment variable that says that this module, and not the user, has bound this process's parent."""
_SYSTEM = Path("/sys")


def bind_to_gpu(device: "torch.device") -> None:
    """Binds this process to the CPUs of its GPU's NUMA node. Does nothing if the user or the scheduler has bound the
    process, if there is one node, or if the node is unknown."""
    if device.type != "cuda":
        return
    with suppress(OSError, ValueError, AttributeError):  # AttributeError: this torch does not tell the address
        allowed, near = os.sched_getaffinity(0), cpus_near(_address(device))
        if len(allowed) == os.cpu_count() and near < allowed:
            os.sched_setaffinity(0, near)
            os.environ[_BOUND] = "1"


def unbind() -> None:
    """Lets this process use all CPUs if its parent was bound to those of another GPU."""
    if os.environ.pop(_BOUND, ""):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def cpus_near(address: str, system: Path = _SYSTEM) -> set[int]:
    """Returns the CPUs of a PCI device's NUMA node; all CPUs of the machine if the device has no node.

    Args:
        address: such as 0000:65:00.0.
        system: where sysfs is.
    Raises:
        OSError: the system does not tell.
    """
    node = int((system / "bus/pci/devices" / address / "numa_node").read_text(encoding="utf-8"))
    place = system / "devices/system"
    listed = place / f"node/node{node}/cpulist" if node >= 0 else place / "cpu/online"
    return set(_numbers(listed.read_text(encoding="utf-8")))


def _address(device: "torch.device") -> str:
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _numbers(listed: str) -> Iterator[int]:
    """Yields the numbers of a list such as 0-3,8."""
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
