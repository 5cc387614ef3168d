"""Hardware faults of this machine's GPUs, as the driver and the kernel's log report them.

A GPU with such a fault may still compute, and give wrong results or hang. The kernel's log is read where this user may
read it (`dmesg`); the driver's counters are read with nvidia-smi.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import datetime

XIDS = {
    46: "stopped processing",
    48: "memory error of two bits (ECC)",
    62: "internal error of the microcontroller",
    64: "memory row that could not be replaced",
    74: "error of NVLink",
    79: "has fallen off the bus",
    92: "high rate of corrected memory errors",
    95: "memory error that reached other work",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    140: "unrecovered memory error",
}
"""XID codes of failing hardware, by NVIDIA's catalogue. Other codes, such as 13 and 31, come from programs."""
_XID = re.compile(r"^(?P<time>\S+).*NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<code>\d+)", re.MULTILINE)
_SECONDS = 30


def gpu_faults(*, since: float = 0.0) -> list[str]:
    """Returns the faults, one per line; empty without a GPU.

    Args:
        since: time from which the kernel's log counts, seconds since 1970.
    """
    if not shutil.which("nvidia-smi"):
        return []
    return [*_memory_faults(), *_xids(since)]


def _memory_faults() -> Iterator[str]:
    counted = "index,ecc.errors.uncorrected.volatile.total"
    for index, errors in _table(f"--query-gpu={counted}"):
        if errors.isdigit() and int(errors):
            yield f"GPU {index} has had {errors} uncorrected memory errors since the driver was loaded (ECC)"
    remapped = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
    for bus, pending, failure in _table(f"--query-remapped-rows={remapped}"):
        if failure in ("1", "Yes"):
            yield f"GPU {bus} could not replace a memory row: exchange the GPU"
        elif pending in ("1", "Yes"):
            yield f"GPU {bus} replaces a memory row when it is reset: drain the node and reset it"


def _xids(since: float) -> Iterator[str]:
    found = {}
    for line in _XID.finditer(_output(["dmesg", "--time-format", "iso"])):
        code, time = int(line["code"]), datetime.fromisoformat(line["time"].replace(",", "."))
        if code in XIDS and time.timestamp() >= since:
            found[line["bus"], code] = time
    for (bus, code), time in found.items():
        yield f"GPU {bus}: XID {code}, {XIDS[code]}, at {time:%Y-%m-%d %H:%M:%S}"


def _table(query: str) -> Iterator[list[str]]:
    for line in _output(["nvidia-smi", query, "--format=csv,noheader,nounits"]).splitlines():
        yield [cell.strip() for cell in line.split(",")]


def _output(command: list[str]) -> str:
    """Returns a program's output; empty if the program is missing, refuses or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
