"""GPU slots of this machine, leased: two runs never compute on one GPU by accident, whoever started them.

A lease is a file lock (flock) on a file of the slot's name in a directory that all users of the machine share. It ends
with the process that holds it, however that ends, so that nothing is ever left to clean up.
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
"""Variable that names the machine's slots, separated by commas, in place of the GPUs that it has."""
DIRECTORY = "RPG_SLOT_DIR"
"""Variable that names the directory of the locks; one directory a machine."""
OF_RUN = "RPG_GPUS"
"""Variable that names the GPUs of a run on this machine, the ranks' first; DeepSpeed's launcher shows ranks their own
alone."""
_POLL_SECONDS = 0.5


class TooFewSlotsError(Exception):
    """The machine has fewer slots than are asked for, or they are taken and must not be waited for."""


def slots_here(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name on this machine: RPG_SLOTS, else the GPUs (UUIDs) that it leaves visible."""
    if SLOTS in environment:
        return _listed(environment[SLOTS])
    gpus = _gpus()
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return list(gpus.values())
    # A MIG device or an abbreviated UUID stands for itself.
    return [gpus.get(name, name) for name in _listed(environment["CUDA_VISIBLE_DEVICES"])] if gpus else []


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _gpus() -> dict[str, str]:
    """Index to UUID, as the driver has them: torch takes seconds to import."""
    program = shutil.which("nvidia-smi")
    if not program:
        return {}
    command = [program, "--query-gpu=index,uuid", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return {index.strip(): uuid.strip() for index, _, uuid in (line.partition(",") for line in listed.splitlines())}
    return {}


def gpus_of_run(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of the run that this process belongs to, as CUDA_VISIBLE_DEVICES has them; empty where none is named."""
    return _listed(environment.get(OF_RUN) or environment.get("CUDA_VISIBLE_DEVICES", ""))


def slots_wanted(device: str, gpus: int) -> int:
    """GPU slots to lease on this machine for a run of `resources.device`; none where it computes on the CPU."""
    return 0 if device == "cpu" or (device == "auto" and not slots_here()) else gpus


@contextmanager
def leased(
    count: int, holder: str, *, waiting: Callable[[str], None] | None, available: Sequence[str] | None = None
) -> Iterator[list[str]]:
    """Holds `count` slots inside the block: those that are free first, all of them or none.

    Args:
        holder: who they are for; shown to others that wait.
        waiting: called about twice a second with who holds them; may raise. None: do not wait.
        available: the machine's slots; None: `slots_here()`.
    Raises:
        TooFewSlotsError: there are not so many, or they are taken and `waiting` is None; the message names the holders.
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
    """Who has which slot, in words; empty where nobody has any."""
    parts = []
    for slot in slots:
        with suppress(OSError, ValueError):
            lease: dict[str, Any] = json.loads(_file(_directory(), slot).read_text())
            # One that was killed left its name. Its lock is gone, but to try that would take it for a moment.
            if psutil.pid_exists(lease["pid"]):
                parts.append(f"{slot} is held by {lease['holder']} (process {lease['pid']} of {lease['user']})")
    return "; ".join(parts)


def _directory() -> Path:
    """Open to all users of the machine, as /tmp is."""
    path = Path(os.environ.get(DIRECTORY) or Path(tempfile.gettempdir()) / "rpg-slots")
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):
            path.chmod(0o1777)
    return path


def _take(directory: Path, slots: Sequence[str], count: int, holder: str) -> dict[str, int] | None:
    """Locks by slot, of the first that are free; None, and none taken, where too few are."""
    # One at a time: two that each hold half of what they need would wait for each other.
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
    """The file, made if need be; for reading only where it is another user's, which is enough to lock it."""
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
