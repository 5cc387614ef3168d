"""Temporary directories of processes. Those of killed processes are removed when another process makes one, and by
every command that runs something.

They are in `tmp` of a home, each next to a lock file of its name that its process keeps locked. The kernel releases the
lock when the process ends, in whatever way.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from specs.machine.files import aside_of

_LOCK = ".lock"


class Scratch:
    """A directory of this process that only this user can read. It exists until `remove`, the end of the block, or the
    process's death."""

    def __init__(self, root: Path, kind: str) -> None:
        """Creates the directory.

        Args:
            root: the home's directory. If it is not writable, the system's temporary directory is used.
            kind: purpose of the directory, the beginning of its name.
        """
        self._lock = -1
        sweep(root)
        try:
            base = root / "tmp"
            base.mkdir(mode=0o700, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=base))
            aside = aside_of(_lock_of(self.path))
            self._lock = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with suppress(OSError):  # a file system without locks: no other process removes it
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            aside.rename(_lock_of(self.path))  # Other processes see it already locked.
        except OSError:
            self.path = Path(tempfile.mkdtemp(prefix=f"rpg-{kind}-"))

    def remove(self) -> None:
        """Removes the directory with all its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            _lock_of(self.path).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def sweep(root: Path) -> None:
    """Removes the scratch directories of a home whose processes have ended."""
    for path in (root / "tmp").glob(f"[!.]*{_LOCK}"):
        with suppress(OSError):  # locked: its process lives; gone: another command was faster
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink()
            finally:
                os.close(lock)


def _lock_of(directory: Path) -> Path:
    return directory.with_name(directory.name + _LOCK)
