"""Liveness of a run: by its newest lease and that one's heartbeat, and by the process that holds it.

`specs.machine.lease` writes leases; here they are read. A run that says `running` and that nobody executes has
crashed.
"""

import os
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from specs.documents.reading import numbered, read_document

FINAL = ("finished", "failed", "cancelled")
"""A run that is so has ended on record, and nobody executes it."""
STATUSES = ("pending", "running", *FINAL, "crashed")
LEASE_SECONDS = 20.0
"""Without a heartbeat for that long, a holder of another host counts as dead and a stopped one of this host too."""


def status_of(run_directory: Path, state: dict[str, Any]) -> str:
    """The status to show for a run: the one on record, or `crashed` if that is running and nobody executes the run.

    Args:
        state: the run's state.json.
    """
    status = state.get("status")
    if status not in STATUSES:
        return "pending"
    if status == "running" and not is_executed(run_directory, state):
        return "crashed"
    return str(status)


def is_executed(run_directory: Path, state: dict[str, Any]) -> bool:
    """Whether a process executes the run now.

    Args:
        state: the run's state.json. It tells where there is no lease, as of a run that an earlier version began; such a
            run has no heartbeat, so that on another host than its own nobody counts as executing it.
    """
    if lease := newest_lease(run_directory):
        return lease.is_held()
    here = state.get("host") in (None, socket.gethostname())
    return here and is_alive(state.get("pid"), state.get("pid_started"))


def is_dead(run_directory: Path, state: dict[str, Any]) -> bool:
    """Whether nobody executes the run, on whichever machine one looks, until a lease of it is written.

    Args:
        state: the run's state.json, as of `is_executed`. Where there is no lease, the run's own host alone can tell.
    """
    if lease := newest_lease(run_directory):
        return not lease.is_held()
    return state.get("host") in (None, socket.gethostname()) and not is_executed(run_directory, state)


def has_holder(run_directory: Path, state: dict[str, Any]) -> bool:
    """Whether the process that holds the run is there, be it stopped (SIGSTOP, Ctrl-Z) for however long.

    Such a run is not executed and may be taken over, but until then what it started is its own.

    Args:
        state: the run's state.json, as of `is_executed`, which judges a run of another host.
    """
    lease = newest_lease(run_directory)
    if lease and not lease.released and lease.is_of_this_host:
        return is_alive(lease.pid, lease.pid_started)
    return is_executed(run_directory, state)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A run's lease as it lies on disk, in `leases/<number>.json`. Its holder alone writes it."""

    number: int
    """From 1. The lease with the highest number is the run's."""
    host: str = ""
    pid: int = 0
    pid_started: str = ""
    """Tells the process from others of that pid: `start_of`."""
    worker: str = ""
    """Name of the worker that started the process; empty where a command did."""
    since: str = ""
    """When the run was taken, UTC, ISO-8601."""
    beat: int = 0
    """How many heartbeats there were: one about every five seconds."""
    at: str = ""
    """When the last one was, UTC, ISO-8601."""
    released: bool = False
    """Whether the holder gave the run back at its end."""
    pid_namespace: str = ""
    """In which `pid` counts: `pid_namespace_here`; empty where the system has none."""
    settles: bool = False
    """Whether the run was taken only to write down how it stands: what a holder before has left is still there."""
    place: str = ""
    """The run's directory: `place_of`; empty if none was recorded."""
    is_copied: bool = False
    """Whether the lease was read in another directory than it is of. Then its holder executes another copy of the run,
    and only a heartbeat that reaches this one, as through an object store, shows that it executes this one too."""

    @property
    def is_of_this_host(self) -> bool:
        """Whether the holder runs on this host, since its last boot, so that its process can be looked at.

        The holder of a copied lease is looked at by the home that the lease is of. Containers may have the host's name
        and boot; a process of another one cannot be looked at all the same.
        """
        of_this_boot = self.pid_started.partition(":")[0] == (_boot() or "clock")
        is_near = self.host == socket.gethostname() and of_this_boot and is_visible(self.pid_namespace)
        return is_near and not self.is_copied

    @property
    def seconds_since_beat(self) -> float:
        """Seconds since the last heartbeat by this host's clock, which may be some seconds off the holder's; infinite
        where the time is unreadable."""
        try:
            return abs((datetime.now(UTC) - datetime.fromisoformat(self.at)).total_seconds())
        except (TypeError, ValueError):
            return float("inf")

    def is_held(self, *, beats: bool | None = None) -> bool:
        """Whether the holder executes the run.

        A holder of this host does while its process lives; but a stopped one (SIGSTOP) only while its heartbeat is
        fresh. A holder of another host does while its heartbeat is fresh.

        Args:
            beats: whether the heartbeat is fresh, where a `LeaseWatch` has seen that; None: by the time written in it.
        """
        if self.released or not self.host:
            return False
        fresh = self.seconds_since_beat < LEASE_SECONDS if beats is None else beats
        if self.is_of_this_host:
            return is_alive(self.pid, self.pid_started) and (fresh or not _is_stopped(self.pid))
        return fresh


def newest_lease(run_directory: Path, *, settling: bool = True) -> LeaseRecord | None:
    """The run's lease of the highest number, released or not; None where there is none.

    Args:
        settling: one counts too under which the run was only settled; else the newest of those that were to execute it.
    """
    for path in reversed(numbered(run_directory / "leases")):
        # Where it is unreadable its number counts all the same, and nobody holds it: `Lease.release` has an empty one.
        document = read_document(path)
        known = {name: document[name] for name in LeaseRecord.__slots__ if name in document}
        is_copied = not is_place(str(known.get("place", "")), run_directory)
        lease = LeaseRecord(**known | {"number": int(path.stem), "is_copied": is_copied})
        if settling or not lease.settles:
            return lease
    return None


class LeaseWatch:
    """Looks at leases again and again, and judges heartbeats by its own clock alone: those of hosts may differ."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[tuple[int, int], float]] = {}
        """Run directory -> the newest lease's number and beat, and when they were first seen."""

    def is_executed(self, run_directory: Path, state: dict[str, Any]) -> bool:
        """Whether a process executes the run, as the function of that name says it; but a heartbeat is fresh until this
        watch has seen it unchanged for `LEASE_SECONDS`."""
        lease = newest_lease(run_directory)
        if lease is None:
            return is_executed(run_directory, state)
        beat, now = (lease.number, lease.beat), time.monotonic()
        before, seen_at = self._seen.get(run_directory, (beat, now))
        self._seen[run_directory] = beat, seen_at if before == beat else now
        return lease.is_held(beats=now - self._seen[run_directory][1] < LEASE_SECONDS)


def _is_stopped(pid: int) -> bool:
    """Whether the process is held by a signal or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def is_alive(pid: Any, started: Any) -> bool:
    """Whether this host's process of that number still is the one that had this `start_of`. A zombie does not live."""
    if not isinstance(pid, int) or not isinstance(started, str):
        return False
    try:
        return start_of(pid) == started and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False


def start_of(pid: int) -> str:
    """Tells a process from every other that has had its number: `<boot>:<when it started>`. Raises psutil.Error.

    Linux counts from the boot, in clock ticks, so setting the clock changes nothing; psutil's `create_time` there is
    that count added to a boot time which moves with the clock. Elsewhere the kernel keeps the time it was started at.
    """
    if not (boot := _boot()):
        return f"clock:{psutil.Process(pid).create_time()}"
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except PermissionError:
        raise psutil.AccessDenied(pid) from None
    except OSError:
        raise psutil.NoSuchProcess(pid) from None
    # The name, in parentheses, may hold anything; the state after it is field 3, the start field 22: proc_pid_stat(5).
    return f"{boot}:{status.rpartition(')')[2].split()[22 - 3]}"


def place_of(directory: Path) -> str:
    """Tells a directory from its copies: its inode and its path. The device is left out: machines that share a
    directory number its device each in its own way."""
    return f"{directory.stat().st_ino} {os.path.realpath(directory)}"


def is_place(place: str, directory: Path) -> bool:
    """Whether a directory is the one that had this `place_of`, and no copy of it; assumed where none was recorded.

    It may have another name by now, or have one on each machine.
    """
    inode, _, path = place.partition(" ")
    if path in ("", str(directory)) or path == os.path.realpath(directory):
        return True
    try:
        if inode != str(directory.stat().st_ino):
            return False
        return os.path.samefile(path, directory)  # else two file systems happen to have the same number
    except OSError:  # nothing has that name any more, or on this machine
        return True


def began_with(pid: int, leader: str) -> bool:
    """Whether a process started when or after another one did, whose `start_of` is given. Raises psutil.Error."""
    (boot, begun), (leaders_boot, leaders_start) = (text.split(":") for text in (start_of(pid), leader))
    return boot == leaders_boot and float(begun) >= float(leaders_start)


def pid_namespace_here() -> str:
    """The PID namespace of this process, as `pid:[4026531836]`; empty where the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_visible(pid_namespace: str) -> bool:
    """Whether a process of that namespace has the same number here; so it was assumed when none was recorded."""
    return pid_namespace in ("", pid_namespace_here())


def _boot() -> str:
    """Which boot of the machine this is; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
