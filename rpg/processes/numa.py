"""Binds a process to the CPUs beside its GPUs.

A machine with several GPUs has several NUMA nodes. A rank or an engine whose threads run on another node than its GPU
copies through the link between the nodes. The call comes before torch starts threads, which inherit the CPUs.
"""

import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_BOUND = "RPG_BOUND_TO_CPUS"
"""Environment variable that says that this module, and not the user, has bound this process's parent."""
_SYSTEM = Path("/sys")
_SECONDS = 30
"""Time limit of nvidia-smi."""


def bind_to_gpu(device: "torch.device") -> None:
    """Binds this process to the CPUs of its GPU's NUMA node. Does nothing if the user or the scheduler has bound the
    process, if there is one node, or if the node is unknown."""
    if device.type != "cuda":
        return
    with suppress(OSError, ValueError, AttributeError):  # AttributeError: this torch does not report the address
        _bind([_address(device)])


def bind_to_visible_gpus() -> None:
    """Binds this process to the CPUs of the NUMA nodes of the GPUs in CUDA_VISIBLE_DEVICES, like `bind_to_gpu`. Does
    not open the GPUs: afterwards this process can still be forked."""
    query = ["nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query += ["-i", visible]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        listing = subprocess.run(query, capture_output=True, encoding="utf-8", timeout=_SECONDS, check=True).stdout
        # The driver writes the domain with eight digits, the system with four.
        _bind(line.strip().lower()[-len("0000:00:00.0") :] for line in listing.splitlines())


def _bind(addresses: Iterable[str]) -> None:
    allowed, near = os.sched_getaffinity(0), set().union(*map(cpus_near, addresses))
    if len(allowed) == os.cpu_count() and set() < near < allowed:
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
        OSError: the system does not report the node.
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
