"""Sharing a run with workers on other machines through an object store: taking it, fetching it, sending its record.

The store's leases have the numbering of the home's (`pipelines.processes.lease`). They are copied into the home as they
appear, so that whoever asks there whether a run was taken over (the fence of trainer and flow) learns of a worker on
another machine too.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

from pipelines.home import Home
from pipelines.processes.lease import Lease, RunBusyError, acquire
from pipelines.remote.object_store import VARIABLE, ObjectStore
from pipelines.remote.record_files import FileVersion
from pipelines.results import filling
from rpg.files import digest, publish_directory, read_json, replacing, write_json
from rpg.processes.fence import Fence, lease_file

_log = logging.getLogger(__name__)
_SECONDS = 5.0
"""Between two looks at what is to be sent."""
_OWN = {"process.json", "cancel.json"}
"""Documents of a run that mean something on its own machine alone."""
_LAST = {"manifest.json": 1, "train.json": 2, "state.json": 3}
"""Documents that say of other files that they are whole: they are fetched after those."""
_MARK = ".shared.json"
"""In a run's directory: the number of the lease under which this home last had the whole run."""
_Files = dict[str, FileVersion]


def shared_run(home: Home, run_id: str) -> "SharedRun | None":
    """The run in the store of RPG_STORE; None without that variable, as where workers share a home."""
    url = os.environ.get(VARIABLE, "")
    return SharedRun(_open(url), home, run_id) if url else None


@cache
def _open(url: str) -> ObjectStore:
    """One for all runs that a process looks at: each has connections of its own."""
    return ObjectStore(url)


class SharedRun:
    """One run, in a home of this machine and in the store."""

    def __init__(self, store: ObjectStore, home: Home, run_id: str) -> None:
        self._store, self._home = store, home
        self._unit, self._directory = f"runs/{run_id}", home.run(run_id)
        self._number = 0
        """Of the lease that this process holds."""
        self._listed: _Files = {}
        """What the store's listing of the run names, while this process holds the run."""
        self._listing = threading.Lock()
        self._sent: dict[str, tuple[tuple[int, int], FileVersion]] = {}
        """Path -> size and time of change of a file when it was sent, and what was sent."""

    def fetch_leases(self) -> int:
        """Copies the newest lease in the store, and those that the home lacks, into the home.

        Returns:
            The newest one's number; 0 where there is none.
        """
        names = self._store.names(f"{self._unit}/leases")
        for name in names:
            is_ours = int(Path(name).stem) == self._number
            if not is_ours and (name == names[-1] or not (self._directory / "leases" / name).exists()):
                self._fetch(f"{self._unit}/leases/{name}")
        return int(Path(names[-1]).stem) if names else 0

    def fetch_standing(self) -> None:
        """Copies how the run stands into the home, its leases and its state, unless this home had the run last."""
        names = self._store.names(f"{self._unit}/leases")
        if names and read_json(self._directory / _MARK).get("lease") != int(Path(names[-1]).stem):
            self.fetch_leases()
            with contextlib.suppress(FileNotFoundError):
                self._fetch(f"{self._unit}/state.json")

    @contextlib.contextmanager
    def held(self, worker: str, others: Iterable[str]) -> Iterator[Lease]:
        """Holds the run in the home and in the store, and first fetches what others recorded of it.

        Within the block threads send what this process records, and its heartbeat; at the end everything is sent once
        more. While the store does not answer, what is recorded waits in the home.

        Args:
            worker: name of the worker that started this process; empty where a command did.
            others: units besides the run to send as soon as they are there: artifacts, the experiment.
        Raises:
            RunBusyError: another process executes the run, here or elsewhere.
        """
        before = self.fetch_leases()
        lease = acquire(self._directory, worker=worker, refresh=self.fetch_leases)
        path, self._number = lease_file(self._directory, lease.number), lease.number
        try:
            if not self._store.create(self._path(path), path.read_bytes()):
                self._give_way(lease)
            self._fetch_run(before)
            write_json(self._directory / _MARK, {"lease": lease.number}, durable=False)
            self._listed = self._store.listings([self._unit]).get(self._unit, {})
        except BaseException:
            if self._number:
                lease.release()
            raise
        units, ended = list(others), threading.Event()
        # A large file takes minutes to send: the heartbeat does not wait for it.
        send, beat = partial(self._send_all, lease.fence, units), partial(self._send_heartbeat, path)
        threads = [threading.Thread(target=self._repeat, args=(job, ended), daemon=True) for job in (send, beat)]
        for thread in threads:
            thread.start()
        try:
            with lease:
                yield lease
        finally:
            ended.set()
            for thread in threads:
                thread.join()
            self._attempt(send)

    def fetch_artifact(self, output: Path) -> None:
        """Fetches an artifact into the home, if the store has it. The caller holds the lock of who makes it."""
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

    def _give_way(self, lease: Lease) -> NoReturn:
        """Has the lease of the machine that was first in the place of the home's own. Raises RunBusyError."""
        lease.release()
        lease_file(self._directory, lease.number).unlink()
        self._number = 0
        self.fetch_leases()
        raise RunBusyError(f"{self._directory.name} was taken by a worker of another machine just now")

    def _fetch_run(self, before: int) -> None:
        """Makes the home's copy of the run that of the store, unless this home was the last to hold the run."""
        listed = self._store.listings([self._unit]).get(self._unit)
        if listed is None or read_json(self._directory / _MARK).get("lease") == before:
            return
        leases = f"{self._unit}/leases/"
        for path in _files(self._home.root, self._unit):
            if path not in listed and not path.startswith(leases):
                (self._home.root / path).unlink()
        for path in sorted(listed, key=lambda path: (_LAST.get(path.rpartition("/")[2], 0), path)):
            here = self._home.root / path
            if not path.startswith(leases) and not (here.is_file() and digest(here) == listed[path].version):
                self._fetch(path)

    def _repeat(self, job: Callable[[], None], ended: threading.Event) -> None:
        while not ended.wait(_SECONDS):
            self._attempt(job)

    def _attempt(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # of the storage's library; training goes on without the store
            _log.warning("the object store does not take what %s records: %s", self._directory.name, error)

    def _send_heartbeat(self, lease: Path) -> None:
        path = self._path(lease)
        sent = self._store.send(self._home.root, path)
        with self._listing:
            if self._listed:
                self._listed[path] = sent
                self._store.write_listing(self._unit, self._listed)

    def _send_all(self, fence: Fence, others: list[str]) -> None:
        for unit in others:
            self._send_unit(unit)
        if self.fetch_leases() > fence.number:
            return  # another worker's record is the run's now
        paths = [path for path in _files(self._home.root, self._unit) if Path(path).name not in _OWN]
        files = self._send_files(paths, self._listed)
        with self._listing:
            gone = [path for path in self._listed if path not in files]
            if files != self._listed:
                self._store.write_listing(self._unit, files)
                self._listed = files
        self._store.remove(gone)

    def _send_unit(self, unit: str) -> None:
        """Sends an artifact once it is whole, and an experiment's documents when they have changed."""
        before = self._store.listings([unit]).get(unit, {})
        if unit.startswith("artifacts/") and (before or not (self._home.root / unit / "manifest.json").is_file()):
            return
        files = self._send_files(_files(self._home.root, unit), before)
        if files != before:
            self._store.write_listing(unit, files)

    def _send_files(self, paths: list[str], there: _Files) -> _Files:
        """Sends each file of which the store does not have the content. Returns what the store has then."""
        files: _Files = {}
        for path in paths:
            local = self._home.root / path
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                status = local.stat()
                stamp = status.st_size, status.st_mtime_ns
                earlier, same = self._sent.get(path), there.get(path)
                if earlier is None or earlier[0] != stamp or earlier[1] != same:
                    is_there = same is not None and same.size == status.st_size and digest(local) == same.version
                    sent = same if same and is_there else self._store.send(self._home.root, path)
                    self._sent[path] = earlier = stamp, sent
                files[path] = earlier[1]
        return files

    def _fetch(self, path: str) -> None:
        with replacing(self._home.root / path, durable=False) as aside:
            self._store.fetch(path, aside)

    def _path(self, local: Path) -> str:
        return local.relative_to(self._home.root).as_posix()


def _files(root: Path, unit: str) -> list[str]:
    """Paths in the home of a unit's files. Hidden ones are still being written; links are not followed."""
    paths: list[str] = []
    for directory, names, files in os.walk(root / unit):
        names[:] = [name for name in names if not name.startswith(".")]
        inside = Path(directory).relative_to(root).as_posix()
        here = [
            name for name in files if not name.startswith(".") and not os.path.islink(os.path.join(directory, name))
        ]
        paths += [f"{inside}/{name}" for name in here]
    return sorted(paths)
