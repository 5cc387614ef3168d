"""Temporary directories of processes. The next process that makes one removes those of killed processes, and so does
every command that runs something.

They lie below a home, in `tmp`, each beside a file of its name that its process holds locked: the kernel ends the lock
with the process, however that ends.
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
    """A directory of this process that only this user can read, until `remove`, the end of the block, or the process's
    death."""

    def __init__(self, root: Path, kind: str) -> None:
        """
        Args:
            root: the home's directory. Where nothing can be written to it, the directory is one of the system's.
            kind: what it is for, the beginning of its name.
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
            aside.rename(_lock_of(self.path))  # Other processes see it locked.
        except OSError:
            self.path = Path(tempfile.mkdtemp(prefix=f"rpg-{kind}-"))

    def remove(self) -> None:
        """Removes it with all that is in it."""
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
    """Removes the scratch directories of a home whose processes are gone."""
    for path in (root / "tmp").glob(f"[!.]*{_LOCK}"):
        with suppress(OSError):  # locked: its process lives; gone: another command was quicker
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink()
            finally:
                os.close(lock)


def _lock_of(directory: Path) -> Path:
    return directory.with_name(directory.name + _LOCK)
