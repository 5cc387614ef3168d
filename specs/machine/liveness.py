"""Liveness of a run, judged by its newest lease, the lease's heartbeat, and the process that holds it.

`specs.machine.lease` writes leases; this module reads them. A run whose status is `running` but that has no live
process has crashed.
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
"""Statuses of a run that has ended on record and therefore has no process."""
STATUSES = ("pending", "running", *FINAL, "crashed")
LEASE_SECONDS = 20.0
"""Seconds without a heartbeat after which a holder on another host, or a stopped holder on this host, counts as
dead."""


def status_of(run_directory: Path, state: dict[str, Any]) -> str:
    """Returns the status to show for a run: the recorded one, or `crashed` if that is `running` but no process executes
    the run.

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
    """Returns whether a process executes the run now.

    Args:
        state: the run's state.json. It decides if there is no lease, because an earlier version began the run. Such a
            run has no heartbeat, so on other hosts it counts as not executed.
    """
    if lease := newest_lease(run_directory):
        return lease.is_held()
    here = state.get("host") in (None, socket.gethostname())
    return here and is_alive(state.get("pid"), state.get("pid_started"))


def is_dead(run_directory: Path, state: dict[str, Any]) -> bool:
    """Returns whether, seen from any machine, no process executes the run. This stays true until a new lease is
    written.

    Args:
        state: the run's state.json, see `is_executed`. Without a lease, only the run's own host can tell.
    """
    if lease := newest_lease(run_directory):
        return not lease.is_held()
    return state.get("host") in (None, socket.gethostname()) and not is_executed(run_directory, state)


def has_holder(run_directory: Path, state: dict[str, Any]) -> bool:
    """Returns whether the process that holds the run exists, even if it has been stopped (SIGSTOP, Ctrl-Z) for long.

    The run of a stopped process is not executed and may be taken over. Until then the processes that it started belong
    to it.

    Args:
        state: the run's state.json, see `is_executed`, which judges a run of another host.
    """
    lease = newest_lease(run_directory)
    if lease and not lease.released and lease.is_of_this_host:
        return is_alive(lease.pid, lease.pid_started)
    return is_executed(run_directory, state)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Content of a run's lease file, `leases/<number>.json`. Only its holder writes it."""

    number: int
    """Number of the lease, from 1. The lease with the highest number owns the run."""
    host: str = ""
    pid: int = 0
    pid_started: str = ""
    """`start_of` the process, which distinguishes it from others with that pid."""
    worker: str = ""
    """Name of the worker that started the process; empty if a command did."""
    since: str = ""
    """Time at which the run was taken, UTC, ISO-8601."""
    beat: int = 0
    """Number of heartbeats so far: one about every five seconds."""
    at: str = ""
    """Time of the last heartbeat, UTC, ISO-8601."""
    released: bool = False
    """Whether the holder gave the run back at its end."""
    pid_namespace: str = ""
    """PID namespace in which `pid` is valid (`pid_namespace_here`); empty if the system has none."""
    settles: bool = False
    """Whether the run was taken only to record its status. Processes of an earlier holder may then still run."""
    place: str = ""
    """`place_of` the run's directory; empty if it was not recorded."""
    is_copied: bool = False
    """Whether the lease was read in a directory other than the one it was written in. Then its holder executes another
    copy of the run. Only a heartbeat that reaches this directory, such as through an object store, shows that it
    executes this copy too."""

    @property
    def is_of_this_host(self) -> bool:
        """Returns whether the holder runs on this host, since its last boot, so that its process can be examined.

        The holder of a copied lease is examined from the home that the lease belongs to. Containers may have the host's
        name and boot; a process of another container still cannot be examined.
        """
        of_this_boot = self.pid_started.partition(":")[0] == (_boot() or "clock")
        is_near = self.host == socket.gethostname() and of_this_boot and is_visible(self.pid_namespace)
        return is_near and not self.is_copied

    @property
    def seconds_since_beat(self) -> float:
        """Returns the seconds since the last heartbeat by this host's clock, which may differ from the holder's by some
        seconds; infinite if the time is unreadable."""
        try:
            return abs((datetime.now(UTC) - datetime.fromisoformat(self.at)).total_seconds())
        except (TypeError, ValueError):
            return float("inf")

    def is_held(self, *, beats: bool | None = None) -> bool:
        """Returns whether the holder executes the run.

        A holder on this host executes it while its process lives; a stopped process (SIGSTOP) counts only while its
        heartbeat is fresh. A holder on another host executes it while its heartbeat is fresh.

        Args:
            beats: whether a `LeaseWatch` found the heartbeat fresh. None: the time written in it decides.
        """
        if self.released or not self.host:
            return False
        fresh = self.seconds_since_beat < LEASE_SECONDS if beats is None else beats
        if self.is_of_this_host:
            return is_alive(self.pid, self.pid_started) and (fresh or not _is_stopped(self.pid))
        return fresh


def newest_lease(run_directory: Path, *, settling: bool = True) -> LeaseRecord | None:
    """Returns the run's lease with the highest number, released or not; None if the run has no lease.

    Args:
        settling: whether leases that only recorded the run's status count too; else the newest lease for execution is
            returned.
    """
    for path in reversed(numbered(run_directory / "leases")):
        # Even if it is unreadable its number counts, and it has no holder: `Lease.release` leaves an empty one.
        document = read_document(path)
        known = {name: document[name] for name in LeaseRecord.__slots__ if name in document}
        is_copied = not is_place(str(known.get("place", "")), run_directory)
        lease = LeaseRecord(**known | {"number": int(path.stem), "is_copied": is_copied})
        if settling or not lease.settles:
            return lease
    return None


class LeaseWatch:
    """Repeated check of leases. It judges heartbeats only by its own clock, because the clocks of hosts may differ."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[tuple[int, int], float]] = {}
        """Run directory -> number and heartbeat of the newest lease, and time at which these were first seen."""

    def is_executed(self, run_directory: Path, state: dict[str, Any]) -> bool:
        """Returns whether a process executes the run, like the function of that name, except that a heartbeat counts as
        fresh until this watch has seen it unchanged for `LEASE_SECONDS`."""
        lease = newest_lease(run_directory)
        if lease is None:
            return is_executed(run_directory, state)
        beat, now = (lease.number, lease.beat), time.monotonic()
        before, seen_at = self._seen.get(run_directory, (beat, now))
        self._seen[run_directory] = beat, seen_at if before == beat else now
        return lease.is_held(beats=now - self._seen[run_directory][1] < LEASE_SECONDS)


def _is_stopped(pid: int) -> bool:
    """Returns whether a signal or a debugger has stopped the process."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def is_alive(pid: Any, started: Any) -> bool:
    """Returns whether the process with that pid on this host is still the one with this `start_of`. A zombie is not
    alive."""
    if not isinstance(pid, int) or not isinstance(started, str):
        return False
    try:
        return start_of(pid) == started and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False


def start_of(pid: int) -> str:
    """Returns a text that distinguishes a process from all others with its pid: `<boot>:<start time>`. Raises
    psutil.Error.

    Linux counts from the boot, in clock ticks, so setting the clock changes nothing. psutil's `create_time` there is
    that count plus a boot time that moves with the clock. Other kernels keep the start time itself.
    """
    if not (boot := _boot()):
        return f"clock:{psutil.Process(pid).create_time()}"
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except PermissionError:
        raise psutil.AccessDenied(pid) from None
    except OSError:
        raise psutil.NoSuchProcess(pid) from None
    # The name, in parentheses, may hold anything; the state after it is field 3, the start time field 22:
    # proc_pid_stat(5).
    return f"{boot}:{status.rpartition(')')[2].split()[22 - 3]}"


def place_of(directory: Path) -> str:
    """Returns a text that distinguishes a directory from its copies: its inode and its path. The device number is left
    out, because machines that share a directory number its device differently."""
    return f"{directory.stat().st_ino} {os.path.realpath(directory)}"


def is_place(place: str, directory: Path) -> bool:
    """Returns whether a directory is the one with this `place_of`, and not a copy of it. True if none was recorded.

    The directory may have been renamed since, or have a different name on each machine.
    """
    inode, _, path = place.partition(" ")
    if path in ("", str(directory)) or path == os.path.realpath(directory):
        return True
    try:
        if inode != str(directory.stat().st_ino):
            return False
        return os.path.samefile(path, directory)  # otherwise two file systems happen to have the same number
    except OSError:  # no such path exists any more, or on this machine
        return True


def began_with(pid: int, leader: str) -> bool:
    """Returns whether a process started at the same time as, or after, the process with the given `start_of`. Raises
    psutil.Error."""
    (boot, begun), (leaders_boot, leaders_start) = (text.split(":") for text in (start_of(pid), leader))
    return boot == leaders_boot and float(begun) >= float(leaders_start)


def pid_namespace_here() -> str:
    """Returns the PID namespace of this process, such as `pid:[4026531836]`; empty if the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_visible(pid_namespace: str) -> bool:
    """Returns whether a process of that namespace has the same pid here. True if no namespace was recorded."""
    return pid_namespace in ("", pid_namespace_here())


def _boot() -> str:
    """Returns an id of the machine's current boot; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
