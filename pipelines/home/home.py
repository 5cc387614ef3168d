"""The home directory and the locks between processes: the only module that knows the layout under RPG_HOME."""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from specs.errors import RpgError

LEAST_FREE = 64 << 20
"""Bytes that a run's records, logs and database rows need, without any model."""
_FULL_BYTES = 1 << 20
_ELSEWHERE = "  hint: set RPG_HOME to the directory for all records; by default it is .rpg here"
STORE = "RPG_STORE"
"""Environment variable of a worker with a private home: an object store's URL, for example s3://bucket/prefix."""
_CALL_SECONDS = 0.5
"""Seconds between two calls of `waiting` while a process waits for a lock."""


@dataclass(frozen=True, slots=True)
class Home:
    """The directory that holds artifacts, runs, the database and the services' state.

    A path made from a name always lies in it: a name that leads elsewhere raises RpgError.
    """

    root: Path

    @classmethod
    def from_environment(cls) -> "Home":
        """Returns RPG_HOME, or `.rpg` in the working directory. Raises RpgError if RPG_HOME cannot name a directory."""
        given = os.environ.get("RPG_HOME") or ".rpg"
        if "://" in given:
            raise RpgError(f"RPG_HOME={given}: an address, not a directory of this machine\n{_ELSEWHERE}")
        root = Path(os.path.expanduser(given)).absolute()
        if os.path.exists(root) and not os.path.isdir(root):
            raise RpgError(f"RPG_HOME={given}: a file, not a directory\n{_ELSEWHERE}")
        if trouble := _unusable(str(root)):
            shown = str(root).encode(errors="backslashreplace").decode()
            raise RpgError(f"{shown}: {trouble}\n  hint: set RPG_HOME to another directory")
        return cls(root)

    def another(self) -> str:
        """Returns a sentence that names the nearest home in a directory above the working one, if this home does not
        exist and RPG_HOME is not set; else empty."""
        if self.root.exists() or os.environ.get("RPG_HOME"):
            return ""
        above = next((folder / ".rpg" for folder in self.root.parent.parents if (folder / ".rpg").is_dir()), None)
        return f"this directory has no home, but {above} exists: run rpg in {above.parent}" if above else ""

    def create(self) -> None:
        """Creates the directory with access for this user alone; an existing one keeps its mode.

        Raises:
            RpgError: the directory cannot be created or is not writable.
        """
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            file = next(path for path in self.root.parents if path.is_file())
            raise RpgError(f"{self.root} cannot be created: {file} is a file\n{_ELSEWHERE}") from None
        except OSError as error:
            raise RpgError(f"{self.root} cannot be created: {error.strerror}\n{_ELSEWHERE}") from None
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise RpgError(f"{self.root} cannot be written to\n{_ELSEWHERE}")

    def check_space(self) -> None:
        """Raises RpgError if the disk has less room than a run's own files need, not counting the model."""
        free = self.free_bytes
        if free < LEAST_FREE:
            needed = f"a run needs {LEAST_FREE >> 20} at least"
            message = f"no space: {free / 2**20:.0f} MiB are free for {self.root}, and {needed}"
            raise RpgError(f"{message}\n  hint: `rpg gc` frees what nothing needs; or set RPG_HOME to another disk")

    @property
    def free_bytes(self) -> int:
        """Returns the free bytes on the home's disk, even if the home does not exist yet."""
        there = next(path for path in (self.root, *self.root.parents) if path.exists())
        return shutil.disk_usage(there).free

    def is_full(self) -> bool:
        """Returns whether the disk is nearly full."""
        return shutil.disk_usage(self.root).free < _FULL_BYTES

    @property
    def prefect(self) -> Path:
        """Returns Prefect's own directory, which is PREFECT_HOME for all processes that we start."""
        return self.root / "prefect"

    @property
    def services(self) -> Path:
        """Returns the directory of `rpg up`'s programs: their settings and passwords, PostgreSQL's and Redis' data."""
        return self.root / "services"

    @property
    def logs(self) -> Path:
        """Returns the directory of the services' logs."""
        return self.root / "logs"

    def artifact(self, stage: str, fingerprint: str) -> Path:
        """Returns the published result of a stage that several runs share: data or base."""
        return self.root / "artifacts" / _name(stage) / _name(fingerprint[:16])

    def run(self, run_id: str) -> Path:
        """Returns the directory of one run."""
        return self.root / "runs" / _name(run_id)

    def experiment(self, name: str) -> Path:
        """Returns the directory of an experiment's record, frozen spec and report."""
        return self.root / "experiments" / _name(name)

    @property
    def verdicts(self) -> Path:
        """Returns the directory of judges' replies, which runs share. `rpg.rewards.Place` finds it from a run's
        directory."""
        return self.root / "verdicts"

    def judge(self, digest: str) -> Path:
        """Returns the file with the agreement between a judge and labels."""
        return self.root / "judges" / f"{_name(digest)}.json"

    def study(self, name: str) -> Path:
        """Returns the directory of a study's journal, record and report."""
        return self.root / "studies" / _name(name)

    def study_flow(self, name: str, flow_run_id: str) -> Path:
        """Returns the directory in which a study's flow run keeps the lease of the process that executes it."""
        return self.study(name) / "flow-runs" / _name(flow_run_id)

    def tensorboard(self, run_id: str) -> Path:
        """Returns the directory of a run's event files, written if its spec has TensorBoard for a sink."""
        return self.root / "tensorboard" / _name(run_id)

    @property
    def wandb(self) -> Path:
        """Returns the directory in which W&B's library keeps its files, including those of offline runs."""
        return self.root / "wandb"

    def offline_wandb(self, run_id: str) -> list[Path]:
        """Returns the copies of a run that W&B's library keeps in offline mode, one directory per session."""
        name = re.compile(rf"offline-run-\d+_\d+-{re.escape(run_id)}")
        return [path for path in self.wandb.glob(f"offline-run-*-{_name(run_id)}") if name.fullmatch(path.name)]

    def sent_copies(self, run_id: str) -> list[Path]:
        """Returns the directory of notes on how much of a run each sink has received from this home."""
        return [path for path in (self.tensorboard(run_id), *self.offline_wandb(run_id)) if path.exists()]

    @contextlib.contextmanager
    def locked(self, name: str, *, waiting: Callable[[], None]) -> Iterator[None]:
        """Holds a lock between processes. The lock is released if the process that holds it dies.

        Args:
            name: name of the work that only one process may do at a time.
            waiting: called repeatedly while another process holds the lock; it may raise to give up.
        """
        self.create()
        path = self.root / "locks" / _name(f"{name}.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock, patience = FileLock(path), 0.0
        while not lock.is_locked:
            try:
                lock.acquire(timeout=patience)
            except Timeout:
                waiting()
                patience = _CALL_SECONDS
        try:
            yield
        finally:
            lock.release()


def _unusable(path: str) -> str:
    """Returns why DuckDB cannot read the files below a directory; empty if it can."""
    if os.fsencode(path) != path.encode(errors="replace"):
        encoding = sys.getfilesystemencoding()
        return (
            f"DuckDB reads paths as UTF-8, which this one is not (this shell's encoding is {encoding}; LC_ALL=C.UTF-8)"
        )
    if "\\" in path and set(path) & set("*?["):
        return "DuckDB reads no file below a path that has a backslash and one of * ? ["
    return ""


def _name(text: str) -> str:
    """Returns a user's or a server's text as one component of a path. Raises RpgError if it cannot be one."""
    if text in ("", ".", "..") or "/" in text or "\0" in text:
        raise RpgError(f"{text!r} is not a valid name: names contain no slash")
    return text
