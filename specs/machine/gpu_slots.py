"""Leases of this machine's GPU slots, so that two runs never use the same GPU by accident, even if different users
started them.

A lease is a file with a file lock (flock) on it, in a directory that all users of the machine share and none of them
owns. It ends with the process that holds it, in whatever way that ends. The users need not trust each other: a process
writes only to files that it has just created. It reads the holder from another user's file and tests its lock. See
docs/decisions/0012-slot-leases.md.
"""

import fcntl
import json
import os
import random
import re
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from specs.machine.files import user_name

SLOTS = "RPG_SLOTS"
"""Environment variable with the machine's slots, separated by commas. They replace its GPUs."""
DIRECTORY = "RPG_SLOT_DIR"
"""Environment variable with the directory of the leases, one per machine."""
OF_RUN = "RPG_GPUS"
"""Environment variable with all GPUs of a run on this machine, those of the ranks first. DeepSpeed's launcher leaves
each rank only its own GPU in CUDA_VISIBLE_DEVICES."""
_SHARED_DIRECTORIES = (Path("/run/lock"), Path("/tmp"), Path("/var/tmp"))
"""Candidates for the directory of the leases. The first one that root owns and that is sticky is used. It is the same
for all users of a machine, whatever their TMPDIR is."""
_POLL_SECONDS = 0.5
_TRIES = 8
"""Number of tries of a process. Two processes that choose at the same moment may both step back, so that each retries
after random pauses."""
_LEASE_BYTES = 4096


class TooFewSlotsError(Exception):
    """Error for a machine that has fewer slots than requested, or whose slots are in use while the caller does not
    wait."""


def slots_here(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the machine's slots, in a form that CUDA_VISIBLE_DEVICES accepts: those in RPG_SLOTS, else the visible
    GPUs by UUID."""
    if SLOTS in environment:
        return _listed(environment[SLOTS])
    gpus = _gpus()
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return list(gpus.values())
    # The name of a MIG device and an abbreviated UUID are not changed.
    return [gpus.get(name, name) for name in _listed(environment["CUDA_VISIBLE_DEVICES"])] if gpus else []


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _gpus() -> dict[str, str]:
    """Returns index -> UUID of each GPU, from nvidia-smi, because importing torch takes seconds."""
    program = shutil.which("nvidia-smi")
    if not program:
        return {}
    command = [program, "--query-gpu=index,uuid", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        listing = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, check=True).stdout
        pairs = (line.partition(",") for line in listing.splitlines())
        return {index.strip(): uuid.strip() for index, _, uuid in pairs}
    return {}


def gpus_of_run(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the GPUs of this process's run, in the form of CUDA_VISIBLE_DEVICES; empty if not known."""
    return _listed(environment.get(OF_RUN) or environment.get("CUDA_VISIBLE_DEVICES", ""))


def gpu_at(known: Sequence[str], place: int) -> str:
    """Returns the name of the run's GPU with this index. If the index is beyond the known GPUs, because the ranks were
    started by hand, the index itself is the name."""
    return known[place] if place < len(known) else str(place)


def slots_wanted(device: str, gpus: int) -> int:
    """Returns the number of GPU slots that a run with this `resources.device` must lease here; 0 if it computes on the
    CPU."""
    return 0 if device == "cpu" or (device == "auto" and not slots_here()) else gpus


@contextmanager
def leased(
    count: int, holder: str, *, waiting: Callable[[str], None] | None, available: Sequence[str] | None = None
) -> Iterator[list[str]]:
    """Leases the first `count` free slots for the block. Leases all of them or none.

    Args:
        holder: the name that is shown to others who wait for the slots.
        waiting: called about twice a second with a message that names the holders; may raise. None: do not wait.
        available: the machine's slots; None: `slots_here()`.
    Raises:
        TooFewSlotsError: the machine has fewer slots, or they are in use and `waiting` is None; the message names the
            holders.
    """
    if not count:
        yield []
        return
    slots = slots_here() if available is None else list(available)
    if len(slots) < count:
        raise TooFewSlotsError(
            f"{count} GPU slots are requested, but this machine has {len(slots)}: {', '.join(slots)}"
        )
    directory = _directory()
    while (leases := _take(directory, slots, count, holder)) is None:
        message = f"{count} of {len(slots)} GPU slots are needed; {holders(slots) or 'none is held now'}"
        if waiting is None:
            raise TooFewSlotsError(message)
        waiting(message)
        time.sleep(_POLL_SECONDS)
    try:
        yield [lease.slot for lease in leases]
    finally:
        for lease in leases:
            lease.release()


def free_slots() -> list[str]:
    """Returns the machine's slots that are free at this moment."""
    slots = slots_here()
    directory = _directory() if slots else Path()
    return [slot for slot in slots if not any(_is_held(path) for path in _lease_files(directory, slot))]


def holders(slots: Sequence[str]) -> str:
    """Describes the holders of the slots; empty if all slots are free."""
    directory = _directory()
    held = ((slot, path) for slot in slots for path in _lease_files(directory, slot))
    return "; ".join(f"{slot} is held by {holder}" for slot, path in held if (holder := _holder_of(path)))


class _Lease:
    """One slot held by this process: a locked file that it has created."""

    def __init__(self, directory: Path, slot: str) -> None:
        """Creates the file and locks it.

        Raises:
            BlockingIOError: another process tested the file's lock at that moment; retryable with a new file.
            OSError: no file can be created in the directory.
        """
        self.slot = slot
        # An unguessable name, so that no other user can create it first; O_EXCL follows no existing file or link.
        self._path = directory / f"{_prefix(slot)}{secrets.token_hex(8)}.lock"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            os.fchmod(self._file, 0o644)  # whatever the umask: other users must be able to test the lock
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._file).st_nlink:  # another process took it for a dead process's file and removed it
                raise BlockingIOError
        except OSError:
            self.release()
            raise

    def is_alone(self) -> bool:
        """Returns whether no other process has a lease of this slot."""
        others = (path for path in _lease_files(self._path.parent, self.slot) if path != self._path)
        return not any(_is_held(path) for path in others)

    def sign(self, holder: str) -> None:
        """Writes the holder's name into the file."""
        with suppress(OSError):  # a full file system: the lock works without a name
            os.pwrite(self._file, json.dumps({"holder": holder, "pid": os.getpid()}).encode()[:_LEASE_BYTES], 0)

    def release(self) -> None:
        """Frees the slot."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._file)


def _directory() -> Path:
    """Returns the directory of the leases.

    Raises:
        TooFewSlotsError: in no directory are a user's files safe from the other users.
    """
    if named := os.environ.get(DIRECTORY):
        path = Path(named)
        if not path.exists():
            path.mkdir(parents=True, exist_ok=True)
            with suppress(PermissionError):  # another user was faster
                path.chmod(0o1777)
        mode = path.stat().st_mode
        if not stat.S_ISDIR(mode) or (mode & stat.S_IWOTH and not mode & stat.S_ISVTX):
            raise TooFewSlotsError(
                f"{DIRECTORY} {path} must be a directory, and sticky if all users may write to it: chmod 1777"
            )
        return path
    for path in _SHARED_DIRECTORIES:
        with suppress(OSError):
            status = path.lstat()
            open_to_all = stat.S_IWOTH | stat.S_ISVTX
            if stat.S_ISDIR(status.st_mode) and status.st_uid == 0 and status.st_mode & open_to_all == open_to_all:
                return path
    raise TooFewSlotsError(
        f"none of {', '.join(map(str, _SHARED_DIRECTORIES))} is a sticky directory of root: set {DIRECTORY}"
    )


def _take(directory: Path, slots: Sequence[str], count: int, holder: str) -> list[_Lease] | None:
    """Returns leases of the first free slots. Returns None, and leases nothing, if too few are free.

    Raises:
        TooFewSlotsError: no file can be created in the directory.
    """
    for _ in range(_TRIES):
        leases: list[_Lease] = []
        try:
            for slot in slots:
                if len(leases) < count and (lease := _lease(directory, slot)):
                    leases.append(lease)
        except OSError as error:
            _release(leases)
            message = f"no lease can be written in {directory}: {error.strerror}; set {DIRECTORY} to another directory"
            raise TooFewSlotsError(message) from error
        except BaseException:
            _release(leases)
            raise
        if len(leases) == count:
            for lease in leases:
                lease.sign(holder)
            return leases
        _release(leases)
        # No process waits for a slot while it holds another, so that two cannot wait for each other.
        time.sleep(random.uniform(0.0, 0.05))
    return None


def _lease(directory: Path, slot: str) -> _Lease | None:
    """Returns a lease of the slot; None if another process has one.

    Each process first locks its own file and then checks for others: of two that do so at the same moment, at least one
    sees the other.
    """
    if any(_is_held(path) for path in _lease_files(directory, slot)):
        return None
    with suppress(BlockingIOError):
        lease = _Lease(directory, slot)
        if lease.is_alone():
            return lease
        lease.release()
    return None


def _release(leases: Sequence[_Lease]) -> None:
    for lease in leases:
        lease.release()


def _prefix(slot: str) -> str:
    return f"rpg-slot-{re.sub(r'[^A-Za-z0-9._-]', '_', slot)}@"


def _lease_files(directory: Path, slot: str) -> list[Path]:
    """Returns the files whose names mark them as leases of the slot."""
    prefix = _prefix(slot)
    return sorted(directory / name for name in os.listdir(directory) if name.startswith(prefix))


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """Yields the descriptor of a lease; None for files that our code never creates: a link, a pipe, or an empty file of
    another user."""
    file = -1
    try:
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        yield file if file >= 0 and stat.S_ISREG(os.fstat(file).st_mode) else None
    finally:
        if file >= 0:
            os.close(file)


def _is_held(path: Path) -> bool:
    """Returns whether a process has locked the file. If a dead process of this user left it, it is removed."""
    with _opened(path) as file:
        if file is None:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        if os.fstat(file).st_uid == os.geteuid():
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return False


def _holder_of(path: Path) -> str:
    """Describes the holder of the lease; empty if it is not held. The user named is the file's owner, whatever the file
    says."""
    with _opened(path) as file, suppress(OSError):
        if file is None or not _is_held(path):
            return ""
        user = user_name(os.fstat(file).st_uid)
        try:
            written = json.loads(os.pread(file, _LEASE_BYTES, 0))
            holder, pid = str(written["holder"])[:100], int(written["pid"])
        except (ValueError, TypeError, KeyError):
            return f"a process of {user}"
        # Another user's text is printed on this user's terminal.
        return f"{''.join(filter(str.isprintable, holder))} (process {pid} of {user})"
    return ""
