"""Leases on runs. One process at a time executes a run. The lease says which process that is, and whether it still
does.

A lease is a file of the run's directory, `leases/<number>.json` (`liveness.LeaseRecord` has the fields). The highest
number owns the run. A process takes a run by creating the file with the next number, which only one of several
processes can do. Its holder renews the heartbeat in it, and no other process writes it. If its holder died, or its
heartbeat stops, another process may create the next one. If the former holder wakes up, it finds that file and stops:
`fence`. A lock of the file system would not work: a stopped process keeps it.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType

from specs.machine.fence import Fence, lease_file
from specs.machine.files import DiskError, create_json, now, read_json, write_json
from specs.machine.liveness import LeaseRecord, is_executed, newest_lease, pid_namespace_here, place_of, start_of

BEAT_SECONDS = 5.0
STILL_SECONDS = 12.0
"""Seconds without a heartbeat after which a run held on another host is taken over: two intervals and some delay."""
_LOOK_SECONDS = 0.5


class RunBusyError(Exception):
    """Error for a run that another process executes."""


class Lease:
    """A run that this process holds until `release` or the end of the block. A thread renews the heartbeat."""

    def __init__(self, run_directory: Path, record: LeaseRecord, *, after: LeaseRecord | None) -> None:
        """Args: the written lease. `after`: the previous lease. Use `acquire` instead."""
        self.fence = Fence(run_directory, record.number)
        self.is_takeover = after is not None and (after.settles or not after.released)
        """Whether the previous holder did not give the run back, so that its processes may still run."""
        self._path = lease_file(run_directory, record.number)
        self._record = record
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        """Returns the lease's number: one more than the previous lease's, from 1 on."""
        return self.fence.number

    @property
    def superseded(self) -> bool:
        """Returns whether another process has taken over the run. Call it before every write; it costs one file
        lookup."""
        return self.fence.superseded

    def release(self) -> None:
        """Gives the run back. From now on it has no holder, even if this process lives on or the disk is full."""
        self._ended.set()
        self._thread.join()
        if not self.superseded and not self._write(replace(self._record, at=now(), released=True)):
            # Truncating needs no disk space. An empty lease keeps its number, so that fences with that number still
            # work.
            with contextlib.suppress(OSError):
                os.truncate(self._path, 0)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS) and not self.superseded:
            self._record = replace(self._record, beat=self._record.beat + 1, at=now())
            self._write(self._record)

    def _write(self, record: LeaseRecord) -> bool:
        """Writes the lease. Returns whether that succeeded. If the disk is full or unavailable for a short time, only
        heartbeats are lost."""
        try:
            write_json(self._path, asdict(record), durable=False)
        except (OSError, DiskError):
            return False
        return True


def acquire(
    run_directory: Path,
    *,
    worker: str = "",
    refresh: Callable[[], object] = lambda: None,
    watched: bool = False,
    settles: bool = False,
) -> Lease:
    """Takes a run for this process. The run need not exist yet. A run without a live process is taken over.

    If a heartbeat of another host looks old, that host's clock may only differ from this one. So it is watched for
    `STILL_SECONDS`, and the run is taken over only if it does not change.

    Args:
        worker: name of the worker that started this process; empty if a command did.
        refresh: called before each read, for directories into which leases of other hosts must be fetched.
        watched: whether the caller has watched the heartbeat (`specs.machine.liveness.LeaseWatch`).
        settles: whether the caller executes nothing and only records the run's status.
    Raises:
        RunBusyError: another process executes the run; the message says which, where and since when.
        DiskError: the disk refused.
    """
    run_directory.mkdir(parents=True, exist_ok=True)
    while True:
        before = newest_lease(run_directory)
        if is_executed(run_directory, read_json(run_directory / "state.json")):
            raise RunBusyError(_busy(run_directory, before))
        if before and before.host and not (before.released or before.is_of_this_host or watched):
            newest = _after_watching(run_directory, before, refresh)
            if newest.number == before.number and newest.beat != before.beat and not newest.released:
                raise RunBusyError(_busy(run_directory, newest))
            if newest != before:
                continue
        begun = now()
        record = LeaseRecord(
            number=before.number + 1 if before else 1,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_started=start_of(os.getpid()),
            worker=worker,
            since=begun,
            at=begun,
            pid_namespace=pid_namespace_here(),
            settles=settles,
            place=place_of(run_directory),
        )
        # If another process was faster, the next round finds its lease.
        with contextlib.suppress(FileExistsError):
            create_json(lease_file(run_directory, record.number), asdict(record))
            return Lease(run_directory, record, after=before)


def _after_watching(run_directory: Path, before: LeaseRecord, refresh: Callable[[], object]) -> LeaseRecord:
    """Watches the run's newest lease. Returns it as soon as it differs from the previous one, or unchanged at the end
    of the wait."""
    deadline = time.monotonic() + STILL_SECONDS
    newest = before
    while newest == before and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        refresh()
        newest = newest_lease(run_directory) or before
    return newest


def _busy(run_directory: Path, lease: LeaseRecord | None) -> str:
    """Describes the process that executes a run."""
    run_id = run_directory.name
    if lease is None or lease.is_of_this_host:
        holder = str(lease.pid if lease else read_json(run_directory / "state.json").get("pid"))
    else:
        worker = f" (worker {lease.worker})" if lease.worker else ""
        holder = f"{lease.pid} of {lease.host}{worker} since {lease.since}"
    return f"{run_id} is being run by process {holder}; `rpg watch {run_id}` follows it, `rpg cancel {run_id}` stops it"
