"""Where everything lives, and the locks between processes: the one place that knows the layout under RPG_HOME."""

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
"""Bytes that a run's records, its logs and the database take before there is any model."""
_FULL_BYTES = 1 << 20
_ELSEWHERE = "  hint: RPG_HOME names the directory in which everything is kept; without it that is .rpg here"
STORE = "RPG_STORE"
"""Environment variable of a worker whose home nobody shares: an object store's URL, as s3://bucket/prefix."""
_CALL_SECONDS = 0.5
"""Between two calls of what a process does while it waits for a lock."""


@dataclass(frozen=True, slots=True)
class Home:
    """The directory that holds artifacts, runs, the database and the services' state.

    The paths of what has a name lie in it, whatever the name: RpgError for one that leads elsewhere.
    """

    root: Path

    @classmethod
    def from_environment(cls) -> "Home":
        """RPG_HOME, or `.rpg` in the working directory. RpgError where RPG_HOME can name no directory."""
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
        """A sentence that names the nearest home in a directory above the working one, where this one is not there and
        RPG_HOME names none; else empty."""
        if self.root.exists() or os.environ.get("RPG_HOME"):
            return ""
        above = next((folder / ".rpg" for folder in self.root.parent.parents if (folder / ".rpg").is_dir()), None)
        return f"there is no home in this directory, but {above}: call rpg from {above.parent}" if above else ""

    def create(self) -> None:
        """Makes the directory, open to this user alone; one that is there keeps its mode.

        Raises:
            RpgError: it cannot be made, or nothing can be written to it.
        """
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            file = next(path for path in self.root.parents if path.is_file())
            raise RpgError(f"{self.root} cannot be made: {file} is a file\n{_ELSEWHERE}") from None
        except OSError as error:
            raise RpgError(f"{self.root} cannot be made: {error.strerror}\n{_ELSEWHERE}") from None
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise RpgError(f"{self.root} cannot be written to\n{_ELSEWHERE}")

    def check_space(self) -> None:
        """Raises RpgError where the disk has less room than a run's own files take, the model aside."""
        free = self.free_bytes
        if free < LEAST_FREE:
            message = (
                f"no space: {free >> 20} MiB are free for {self.root}, and a run needs {LEAST_FREE >> 20} at least"
            )
            raise RpgError(f"{message}\n  hint: `rpg gc` frees what nothing needs; or set RPG_HOME to another disk")

    @property
    def free_bytes(self) -> int:
        """Free room on the home's disk, also before the home exists."""
        there = next(path for path in (self.root, *self.root.parents) if path.exists())
        return shutil.disk_usage(there).free

    def is_full(self) -> bool:
        """Whether hardly anything can be written to the disk now."""
        return shutil.disk_usage(self.root).free < _FULL_BYTES

    @property
    def prefect(self) -> Path:
        """Prefect's own directory: PREFECT_HOME of everything that we start."""
        return self.root / "prefect"

    @property
    def services(self) -> Path:
        """Directory of `rpg up`'s programs: their settings and passwords, PostgreSQL's and Redis' data."""
        return self.root / "services"

    @property
    def logs(self) -> Path:
        """Logs of the services."""
        return self.root / "logs"

    def artifact(self, stage: str, fingerprint: str) -> Path:
        """The published result of a stage that several runs share: data or base."""
        return self.root / "artifacts" / _name(stage) / _name(fingerprint[:16])

    def run(self, run_id: str) -> Path:
        """Everything of one run."""
        return self.root / "runs" / _name(run_id)

    def experiment(self, name: str) -> Path:
        """An experiment's record, its frozen spec and its report."""
        return self.root / "experiments" / _name(name)

    @property
    def verdicts(self) -> Path:
        """Replies of judges, which runs share; `rpg.rewards.Place` finds them from a run's directory."""
        return self.root / "verdicts"

    def judge(self, digest: str) -> Path:
        """How far a judge agrees with labels."""
        return self.root / "judges" / f"{_name(digest)}.json"

    def study(self, name: str) -> Path:
        """A study's journal, record and report."""
        return self.root / "studies" / _name(name)

    def study_flow(self, name: str, flow_run_id: str) -> Path:
        """Where a study's flow run on a server has the lease of the process that executes it."""
        return self.study(name) / "flow-runs" / _name(flow_run_id)

    def tensorboard(self, run_id: str) -> Path:
        """A run's event files, where its spec has TensorBoard for a sink."""
        return self.root / "tensorboard" / _name(run_id)

    @property
    def wandb(self) -> Path:
        """Where W&B's library keeps its files, those of offline runs too."""
        return self.root / "wandb"

    def offline_wandb(self, run_id: str) -> list[Path]:
        """Copies of a run that W&B's library keeps in offline mode: a directory for each session."""
        name = re.compile(rf"offline-run-\d+_\d+-{re.escape(run_id)}")
        return [path for path in self.wandb.glob(f"offline-run-*-{_name(run_id)}") if name.fullmatch(path.name)]

    def sent_copies(self, run_id: str) -> list[Path]:
        """Notes of what each sink holds of a run in this home."""
        return [path for path in (self.tensorboard(run_id), *self.offline_wandb(run_id)) if path.exists()]

    @contextlib.contextmanager
    def locked(self, name: str, *, waiting: Callable[[], None]) -> Iterator[None]:
        """Holds a lock between processes. If the process that holds it dies, the lock is free.

        Args:
            name: of the work that only one process may do at a time.
            waiting: called now and then while another process holds the lock; it may raise to give up.
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
        return f"DuckDB takes a path for UTF-8, and this is not (this shell's encoding is {encoding}; LC_ALL=C.UTF-8)"
    if "\\" in path and set(path) & set("*?["):
        return "DuckDB reads no file below a path that has a backslash and one of * ? ["
    return ""


def _name(text: str) -> str:
    """The text, which a user or a server gave, as one part of a path. Raises RpgError where it is none."""
    if text in ("", ".", "..") or "/" in text or "\0" in text:
        raise RpgError(f"{text!r} is no name of anything here: names hold no slash")
    return text
