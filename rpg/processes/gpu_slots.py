"""Leases of this machine's GPU slots, so that two runs never compute on one GPU by accident, whoever started them.

A lease is a file lock (flock) on a file named after the slot, in a directory that all users of the machine share. It
ends with the process that holds it, however that ends, so that nothing is ever left to clean up.
"""

import fcntl
import getpass
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

SLOTS = "RPG_SLOTS"
"""Environment variable that names the machine's slots, separated by commas, in place of the GPUs that it has."""
DIRECTORY = "RPG_SLOT_DIR"
"""Environment variable that names the directory of the locks, one a machine."""
OF_RUN = "RPG_GPUS"
"""Environment variable that names all GPUs of a run on this machine, the ranks' first. In CUDA_VISIBLE_DEVICES the
launcher of DeepSpeed leaves each rank only its own."""
_POLL_SECONDS = 0.5


class TooFewSlotsError(Exception):
    """The machine has fewer slots than are asked for, or they are taken and the caller does not wait."""


def slots_here(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The machine's slots, as CUDA_VISIBLE_DEVICES can name them: those in RPG_SLOTS, else the visible GPUs by UUID."""
    if SLOTS in environment:
        return _listed(environment[SLOTS])
    gpus = _gpus()
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return list(gpus.values())
    # The name of a MIG device and an abbreviated UUID are kept as they are.
    return [gpus.get(name, name) for name in _listed(environment["CUDA_VISIBLE_DEVICES"])] if gpus else []


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _gpus() -> dict[str, str]:
    """Index -> UUID of each GPU, from nvidia-smi, since torch takes seconds to import."""
    program = shutil.which("nvidia-smi")
    if not program:
        return {}
    command = [program, "--query-gpu=index,uuid", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        listing = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        pairs = (line.partition(",") for line in listing.splitlines())
        return {index.strip(): uuid.strip() for index, _, uuid in pairs}
    return {}


def gpus_of_run(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of the run that this process belongs to, as CUDA_VISIBLE_DEVICES names them; empty where not known."""
    return _listed(environment.get(OF_RUN) or environment.get("CUDA_VISIBLE_DEVICES", ""))


def slots_wanted(device: str, gpus: int) -> int:
    """How many GPU slots a run of this `resources.device` has to lease here; 0 where it computes on the CPU."""
    return 0 if device == "cpu" or (device == "auto" and not slots_here()) else gpus


@contextmanager
def leased(
    count: int, holder: str, *, waiting: Callable[[str], None] | None, available: Sequence[str] | None = None
) -> Iterator[list[str]]:
    """Holds `count` slots within the block: the first that are free, all together or none.

    Args:
        holder: the name that others who wait for the slots are shown.
        waiting: called about twice a second with a message that names the holders; may raise. None: do not wait.
        available: the machine's slots; None: `slots_here()`.
    Raises:
        TooFewSlotsError: the machine has fewer, or they are taken and `waiting` is None; the message names the holders.
    """
    if not count:
        yield []
        return
    slots = slots_here() if available is None else list(available)
    if len(slots) < count:
        raise TooFewSlotsError(f"{count} GPU slots are asked for and this machine has {len(slots)}: {', '.join(slots)}")
    directory = _directory()
    while (locks := _take(directory, slots, count, holder)) is None:
        message = f"{count} of {len(slots)} GPU slots are needed; {holders(slots) or 'all are free in a moment'}"
        if waiting is None:
            raise TooFewSlotsError(message)
        waiting(message)
        time.sleep(_POLL_SECONDS)
    try:
        yield list(locks)
    finally:
        _release(locks)


def holders(slots: Sequence[str]) -> str:
    """Who holds which slot, in words; empty where all are free."""
    parts = []
    for slot in slots:
        with suppress(OSError, ValueError):
            lease: dict[str, Any] = json.loads(_file(_directory(), slot).read_text())
            # A killed holder leaves its name in the file. Its lock is gone, but trying the lock would take it.
            if psutil.pid_exists(lease["pid"]):
                parts.append(f"{slot} is held by {lease['holder']} (process {lease['pid']} of {lease['user']})")
    return "; ".join(parts)


def _directory() -> Path:
    """The directory of the locks, which like /tmp is open to all users of the machine."""
    path = Path(os.environ.get(DIRECTORY) or Path(tempfile.gettempdir()) / "rpg-slots")
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):
            path.chmod(0o1777)
    return path


def _take(directory: Path, slots: Sequence[str], count: int, holder: str) -> dict[str, int] | None:
    """Slot -> file descriptor of its lock, for the first that are free. None, and none taken, where too few are."""
    # Only one process chooses at a time: two that each held half of what they need would wait for each other.
    gate = _open(directory / "choosing.lock")
    locks: dict[str, int] = {}
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        for slot in slots:
            if len(locks) < count and (lock := _try(_file(directory, slot))) is not None:
                locks[slot] = lock
    finally:
        os.close(gate)
    if len(locks) < count:
        _release(locks)
        return None
    lease = json.dumps({"holder": holder, "pid": os.getpid(), "user": _user(), "since": time.time()}).encode()
    for lock in locks.values():
        with suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, lease, 0)
    return locks


def _try(path: Path) -> int | None:
    lock = _open(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except BlockingIOError:
        os.close(lock)
        return None


def _open(path: Path) -> int:
    """Opens the file, created if need be. Another user's is opened for reading only, which is enough to lock it."""
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        with suppress(FileNotFoundError, PermissionError):
            lock = os.open(path, flags, 0o666)
            with suppress(PermissionError):
                os.fchmod(lock, 0o666)  # whatever the umask
            return lock
    raise TooFewSlotsError(f"{path} cannot be opened; {DIRECTORY} may name another directory")


def _release(locks: Mapping[str, int]) -> None:
    for lock in locks.values():
        with suppress(OSError):
            os.ftruncate(lock, 0)
        os.close(lock)


def _file(directory: Path, slot: str) -> Path:
    return directory / (re.sub(r"[^A-Za-z0-9._-]", "_", slot) + ".lock")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
