"""Sharing of a run with workers on other machines through an object store: claiming the run, fetching it, sending its
record.

The store's leases have the numbering of the home's (`specs.machine.lease`). They are copied into the home as they
appear, so that a check in the home whether a run was taken over (the fence of trainer and flow) also finds a worker on
another machine.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from pipelines.home.home import STORE, Home
from pipelines.home.results import filling
from pipelines.home.versions import merged_versions
from pipelines.remote.object_store import ObjectStore
from pipelines.remote.record_files import FileVersion
from specs.errors import RpgError
from specs.machine.fence import Fence, lease_file
from specs.machine.files import DiskError, digest, publish_directory, read_json, replacing, write_json
from specs.machine.lease import Lease, RunBusyError, acquire
from specs.machine.liveness import newest_lease

_log = logging.getLogger(__name__)
_SECONDS = 5.0
"""Seconds between two checks for files to send."""
_UNSENT_SECONDS = 30.0
"""Seconds between two attempts to send the unsent files of runs that have ended."""
_OWN = {"process.json", "cancel.json"}
"""Documents of a run that only its own machine uses."""
_LAST = {"manifest.json": 1, "train.json": 2, "state.json": 3}
"""Documents that declare other files complete. They are fetched after these files."""
_MARK = ".shared.json"
"""File in a run's directory with the number of the lease under which this home last had the whole run."""
_Files = dict[str, FileVersion]


class StoreAwayError(RpgError):
    """Error for a run that did not begin because the object store did not answer. Retryable."""


def keep_sending(home: Home) -> None:
    """Sends the unsent records of this home's runs from now on, in a thread that ends with the process.

    Does nothing without RPG_STORE.
    """
    if os.environ.get(STORE):
        threading.Thread(target=_keep_sending, args=(home,), name="sharing", daemon=True).start()


def _keep_sending(home: Home) -> None:
    while True:
        try:
            send_unsent(home)
        except Exception as error:  # disk errors, or the storage library's; the next round retries
            _log.warning("records that runs could not send to the object store are still pending: %s", error)
        time.sleep(_UNSENT_SECONDS)


def send_unsent(home: Home) -> None:
    """Sends the unsent records of runs without a live process once. Keeps those that the store does not accept yet."""
    unsent = sorted(_unsent_file(home, "").parent.glob("*.json"))
    if unsent:
        # Only one of several workers with this home sends.
        with home.locked("unsent", waiting=lambda: None):
            for path in unsent:
                if shared := shared_run(home, path.stem):
                    shared.send_unsent()


def _unsent_file(home: Home, run_id: str) -> Path:
    """Returns the path of the note that exists while the store may lack part of a run's record. The note names the
    lease under which that part was recorded, and other units to send."""
    return home.root / "remote" / "unsent" / f"{run_id}.json"


def shared_run(home: Home, run_id: str) -> "SharedRun | None":
    """Returns the run in the store of RPG_STORE; None without that variable, for workers that share a home."""
    url = os.environ.get(STORE, "")
    return SharedRun(_open(url), home, run_id) if url else None


@cache
def _open(url: str) -> ObjectStore:
    """Returns the store. A process uses the same one for all its runs, because each store has its own connections."""
    return ObjectStore(url)


class SharedRun:
    """A run that is both in a home of this machine and in the store."""

    def __init__(self, store: ObjectStore, home: Home, run_id: str) -> None:
        self._store, self._home = store, home
        self._unit, self._directory = f"runs/{run_id}", home.run(run_id)
        self._unsent = _unsent_file(home, run_id)
        self._number = 0
        """Fencing number of the lease that this process holds."""
        self._listed: _Files = {}
        """Files in the store's listing of the run, while this process holds the run."""
        self._listing, self._fetching_leases = threading.Lock(), threading.Lock()
        self._sent: dict[str, tuple[tuple[int, int], FileVersion]] = {}
        """Path -> size and modification time of a file when it was sent, and the version that was sent."""

    def fetch_leases(self) -> int:
        """Copies the newest lease in the store, and those that the home lacks, into the home.

        Returns:
            The newest one's number; 0 without leases.
        """
        # If this home held a lease, the store's copy of it may be older.
        ours = {self._number, read_json(self._directory / _MARK).get("lease")}
        with self._fetching_leases:
            names = self._store.names(f"{self._unit}/leases")
            for name in names:
                here = self._directory / "leases" / name
                if not here.exists() or (name == names[-1] and int(here.stem) not in ours):
                    self._fetch(f"{self._unit}/leases/{name}")
        return int(Path(names[-1]).stem) if names else 0

    def fetch_standing(self) -> None:
        """Copies the run's leases and its state into the home, unless this home had the run last."""
        names = self._store.names(f"{self._unit}/leases")
        if names and read_json(self._directory / _MARK).get("lease") != int(Path(names[-1]).stem):
            self.fetch_leases()
            with contextlib.suppress(FileNotFoundError):
                self._fetch(f"{self._unit}/state.json")

    @contextlib.contextmanager
    def held(self, worker: str, others: Iterable[str]) -> Iterator[Lease]:
        """Fetches the records of the run that other homes made, and holds the run's lease in the home and in the store.

        From then to the end a thread renews the lease in the store, and within the block another sends this process's
        records. At the end everything is sent once more, and only then the lease is released: a worker that finds it
        released finds the whole record. While the store does not answer, records wait in the home; at the end they are
        noted for `send_unsent`.

        Args:
            worker: name of the worker that started this process; empty if a command did.
            others: other units to send as soon as they exist: artifacts, the experiment.
        Raises:
            RunBusyError: another process executes the run, here or elsewhere.
            StoreAwayError: the store does not answer, so that the process that executes the run is unknown; the run is
                unchanged.
        """
        before = 0

        def look() -> None:
            nonlocal before
            before = self.fetch_leases()

        with self._store_needed():
            look()
            lease = acquire(self._directory, worker=worker, refresh=look)
        self._enter(lease)
        units, is_sent = list(others), False
        # A large file takes minutes to fetch or to send: the heartbeat does not wait for it.
        send, beat = partial(self._send_all, lease.fence, units), partial(self._send_heartbeat, lease.fence)
        try:
            with self._repeated(beat):
                with self._store_needed():
                    if read_json(self._directory / _MARK).get("lease") != before:
                        self._fetch_run()
                    write_json(self._unsent, {"lease": lease.number, "units": units})
                    write_json(self._directory / _MARK, {"lease": lease.number}, durable=False)
                    self._listed = self._store.listings([self._unit]).get(self._unit, {})
                try:
                    with self._repeated(send):
                        yield lease
                finally:
                    is_sent = self._attempt(send)
        finally:
            lease.release()
            if self._attempt(beat) and is_sent:
                self._forget_unsent(lease.number)

    def send_unsent(self) -> None:
        """Sends this home's unsent records of the run, unless another process has taken over the run."""
        note = read_json(self._unsent)
        number = note.get("lease", 0)
        if read_json(self._directory / _MARK).get("lease") != number:
            self._forget_unsent(number)
            return
        lease = newest_lease(self._directory)
        if lease is None or lease.number != number or lease.is_held():
            return  # the process that executes the run sends it
        fence, self._number = Fence(self._directory, number), number

        def send() -> None:
            self._listed = self._store.listings([self._unit]).get(self._unit, {})
            self._send_all(fence, note["units"])
            self._send_heartbeat(fence)

        if self._attempt(send):
            self._forget_unsent(number)

    def fetch_artifact(self, output: Path) -> None:
        """Fetches an artifact into the home, if the store has it. The caller holds the lock for making it."""
        unit = self._path(output)
        listed = self._store.listings([unit]).get(unit, {})
        if not listed:
            return
        with filling(output) as aside:
            for path in listed:
                here = aside / Path(path).relative_to(unit)
                here.parent.mkdir(parents=True, exist_ok=True)
                self._store.fetch(path, here)
            publish_directory(aside, output)

    @contextlib.contextmanager
    def _store_needed(self) -> Iterator[None]:
        """Raises StoreAwayError instead of the exceptions of the storage's library."""
        try:
            yield
        except (RunBusyError, RpgError, DiskError):
            raise
        except Exception as error:
            raise StoreAwayError(
                f"{self._directory.name} was not begun: the object store of {STORE} does not answer: {error}"
            ) from error

    def _enter(self, lease: Lease) -> None:
        """Writes the home's new lease to the store, or withdraws it: the numbers in the store have no gaps.

        Raises:
            RunBusyError: a worker of another machine was first; the home then has that worker's lease.
            StoreAwayError: the store does not answer.
        """
        path, self._number, self._listed = lease_file(self._directory, lease.number), lease.number, {}
        is_entered = False
        try:
            with self._store_needed():
                is_entered = self._store.create(self._path(path), path.read_bytes())
        finally:
            if not is_entered:
                lease.release()
                path.unlink()
                self._number = 0
        if not is_entered:
            with self._store_needed():
                self.fetch_leases()
            raise RunBusyError(f"{self._directory.name} has just been taken over by a worker on another machine")

    def _fetch_run(self) -> None:
        """Replaces the home's copy of the run by the store's, if the store has the run."""
        listed = self._store.listings([self._unit]).get(self._unit)
        if listed is None:
            return
        leases = f"{self._unit}/leases/"
        for path in _files(self._home.root, self._unit):
            if path not in listed and not path.startswith(leases):
                (self._home.root / path).unlink()
        for path in sorted(listed, key=lambda path: (_LAST.get(path.rpartition("/")[2], 0), path)):
            here = self._home.root / path
            if not path.startswith(leases) and not (here.is_file() and digest(here) == listed[path].version):
                self._fetch(path)

    @contextlib.contextmanager
    def _repeated(self, job: Callable[[], None]) -> Iterator[None]:
        """Runs the job in a thread every few seconds until the end of the block."""
        ended = threading.Event()

        def repeat() -> None:
            while not ended.wait(_SECONDS):
                self._attempt(job)

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _attempt(self, job: Callable[[], None]) -> bool:
        """Runs a job that the store may refuse now. Returns whether it succeeded."""
        try:
            job()
        except Exception as error:  # an error of the storage's library; training continues without the store
            _log.warning("the object store does not accept the records of %s: %s", self._directory.name, error)
            return False
        return True

    def _is_taken(self, fence: Fence) -> bool:
        """Returns whether another worker, on any machine, has the run. Then only that worker's record counts."""
        self.fetch_leases()
        return fence.superseded

    def _forget_unsent(self, number: int) -> None:
        """Removes the note of unsent files, unless a process that took over the run later wrote it."""
        if read_json(self._unsent).get("lease", 0) == number:
            self._unsent.unlink(missing_ok=True)

    def _send_heartbeat(self, fence: Fence) -> None:
        if self._is_taken(fence):
            return
        path = self._path(lease_file(self._directory, fence.number))
        sent = self._store.send(self._home.root, path)
        with self._listing:
            if self._listed:
                self._listed[path] = sent
                self._store.write_listing(self._unit, self._listed)

    def _send_all(self, fence: Fence, others: list[str]) -> None:
        for unit in others:
            self._send_unit(unit)
        paths = [path for path in _files(self._home.root, self._unit) if Path(path).name not in _OWN]
        # Leases last: a released lease says that everything recorded under it is in the store.
        paths.sort(key=lambda path: (path.startswith(f"{self._unit}/leases/"), path))
        files = self._send_files(paths, self._listed, fence)
        if self._is_taken(fence):
            return
        with self._listing:
            gone = [path for path in self._listed if path not in files]
            if files != self._listed:
                self._store.write_listing(self._unit, files)
                self._listed = files
        self._store.remove(gone)

    def _send_unit(self, unit: str) -> None:
        """Sends an artifact once it is complete, and an experiment's documents when they have changed."""
        before = self._store.listings([unit]).get(unit, {})
        if unit.startswith("artifacts/") and (before or not (self._home.root / unit / "manifest.json").is_file()):
            return
        files = self._send_files(_files(self._home.root, unit), before)
        if files != before:
            self._store.write_listing(unit, files)

    def _send_files(self, paths: list[str], there: _Files, fence: Fence | None = None) -> _Files:
        """Sends each file whose content the store does not have. Returns the store's files after that.

        Args:
            fence: stops sending once another worker has the run; None for files that belong to no run.
        """
        files: _Files = {}
        for path in paths:
            local = self._home.root / path
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                status = local.stat()
                stamp = status.st_size, status.st_mtime_ns
                earlier, same = self._sent.get(path), there.get(path)
                if earlier is None or earlier[0] != stamp or earlier[1] != same:
                    is_there = same is not None and same.size == status.st_size and digest(local) == same.version
                    if fence and not is_there and self._is_taken(fence):
                        break
                    sent = same if same and is_there else self._send(path, same)
                    self._sent[path] = earlier = stamp, sent
                files[path] = earlier[1]
        return files

    def _send(self, path: str, there: FileVersion | None) -> FileVersion:
        if there is None or not path.endswith("/experiment.json"):
            return self._store.send(self._home.root, path)
        merged = _merged(read_json(self._home.root / path), json.loads(self._store.read(path)))
        return self._store.write(path, json.dumps(merged, indent=1, ensure_ascii=False).encode())

    def _fetch(self, path: str) -> None:
        with replacing(self._home.root / path, durable=False) as aside:
            self._store.fetch(path, aside)

    def _path(self, local: Path) -> str:
        return local.relative_to(self._home.root).as_posix()


def _files(root: Path, unit: str) -> list[str]:
    """Returns the paths in the home of a unit's files. Skips hidden files, which are still being written, and links."""
    paths: list[str] = []
    for directory, names, files in os.walk(root / unit):
        names[:] = [name for name in names if not name.startswith(".")]
        inside = Path(directory).relative_to(root).as_posix()
        here = [
            name for name in files if not name.startswith(".") and not os.path.islink(os.path.join(directory, name))
        ]
        paths += [f"{inside}/{name}" for name in here]
    return sorted(paths)


def _merged(here: dict[str, Any], there: dict[str, Any]) -> dict[str, Any]:
    """Returns the union of an experiment's records in two homes. Each record lists the runs that its home began.

    All runs count. Those of the newer spec are current, those of both homes if they have the same cells. Merging again
    changes nothing, so that two workers do not send the record back and forth.
    """
    newer = max((there, here), key=lambda record: str(record.get("updated_at", "")))
    merged = newer | {"runs": _union(there, here, "runs")}
    if here.get("fingerprint") == there.get("fingerprint"):
        labels = there.get("labels", {})
        merged |= {
            "current": _union(there, here, "current"),
            "labels": labels | here.get("labels", {}) | labels,
        }
    if versions := merged_versions(there, here, newer):
        merged["versions"] = [version.to_json() for version in versions]
        merged["current"] = list(versions[-1].runs)
    return merged


def _union(first: dict[str, Any], second: dict[str, Any], key: str) -> list[str]:
    return list(dict.fromkeys([*first.get(key, []), *second.get(key, [])]))
