"""The lease on a run: one process at a time executes it, and whoever looks can tell which, and whether it still does.

A lease is a file of the run's directory, `leases/<number>.json` (`liveness.LeaseRecord` has the fields). The highest
number owns the run. To take a run is to create the file of the next number, in which only one of several processes can
succeed. Its holder renews the heartbeat in it, and nobody else writes it; a lease whose holder died, or does not beat,
may be followed by the next one. The holder before, should it wake up, finds that file and stops: `fence`. A lock of the
file system would not do: a stopped process keeps it.
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
"""A heartbeat of another host has to stand still so long, two beats and some delay, before its run is taken over."""
_LOOK_SECONDS = 0.5


class RunBusyError(Exception):
    """Another process executes this run."""


class Lease:
    """A run that this process holds, until `release` or the end of the block. A thread renews the heartbeat."""

    def __init__(self, run_directory: Path, record: LeaseRecord, *, after: LeaseRecord | None) -> None:
        """Use `acquire`. `after`: the lease before this one."""
        self.fence = Fence(run_directory, record.number)
        self.is_takeover = after is not None and (after.settles or not after.released)
        """Whether the holder before did not give the run back: what it started may still be there."""
        self._path = lease_file(run_directory, record.number)
        self._record = record
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        """From 1; one more than that of the lease before."""
        return self.fence.number

    @property
    def superseded(self) -> bool:
        """Whether another process has taken the run over. Ask before every write; it costs one look at the disk."""
        return self.fence.superseded

    def release(self) -> None:
        """Gives the run back: from now on nobody holds it, though this process lives on, and be the disk full."""
        self._ended.set()
        self._thread.join()
        if not self.superseded and not self._write(replace(self._record, at=now(), released=True)):
            # That needs no room. An empty lease keeps its number, so that the fence of what worked under it holds.
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
        """Writes, and says whether the disk took it. One that is full or away costs a few heartbeats, not the run."""
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
    """Takes a run for this process. It need not exist yet, and a run that nobody executes any more is taken over.

    A heartbeat of another host that looks old may come from a clock that differs from this one. So it is watched for
    `STILL_SECONDS`, and the run is taken over only where it stands still.

    Args:
        worker: name of the worker that started this process; empty where a command did.
        refresh: called before each look, where leases of other hosts reach the directory only by being fetched.
        watched: whether the caller has watched the heartbeat (`specs.machine.liveness.LeaseWatch`).
        settles: whether the caller will execute nothing, only write down how the run stands.
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
        # Where another process was first, the next round meets its lease.
        with contextlib.suppress(FileExistsError):
            create_json(lease_file(run_directory, record.number), asdict(record))
            return Lease(run_directory, record, after=before)


def _after_watching(run_directory: Path, before: LeaseRecord, refresh: Callable[[], object]) -> LeaseRecord:
    """The run's newest lease as soon as it differs from the one before; that one where it stands still."""
    deadline = time.monotonic() + STILL_SECONDS
    newest = before
    while newest == before and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        refresh()
        newest = newest_lease(run_directory) or before
    return newest


def _busy(run_directory: Path, lease: LeaseRecord | None) -> str:
    """Who executes a run, in words."""
    run_id = run_directory.name
    if lease is None or lease.is_of_this_host:
        holder = str(lease.pid if lease else read_json(run_directory / "state.json").get("pid"))
    else:
        worker = f" (worker {lease.worker})" if lease.worker else ""
        holder = f"{lease.pid} of {lease.host}{worker} since {lease.since}"
    return f"{run_id} is being run by process {holder}; `rpg watch {run_id}` follows it, `rpg cancel {run_id}` stops it"
