"""A disk that takes no more: said so that a user knows what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = {errno.ENOSPC: "no space is left on the device", errno.EDQUOT: "the disk quota is used up"}


class DiskError(RuntimeError):
    """Something could not be written. What was on disk before is whole."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns a failure to write into a DiskError that names the place and the way out."""
    try:
        yield
    except OSError as error:
        reason = _FULL.get(error.errno or 0)
        if reason is None:
            raise DiskError(f"cannot write {path}: {error.strerror or error}") from error
        hint = "free some, and `rpg resume` goes on from the last whole checkpoint"
        raise DiskError(f"cannot write {path}: {reason}; {hint}") from error
