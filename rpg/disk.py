"""A disk that takes no more: said so that a user knows what to do, and nothing half written left behind."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REASONS = {
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the system allows",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the device failed",
}


class DiskError(RuntimeError):
    """Something could not be written. What was on disk before is whole."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns a disk's refusal into a DiskError that names the place and the way out; other errors pass."""
    try:
        yield
    except Exception as error:
        reason = _REASONS.get(_number_of(error))
        if reason is None:
            raise
        hint = "with that mended, `rpg resume` goes on from the last whole checkpoint"
        raise DiskError(f"cannot write {path}: {reason}; {hint}") from error


def _number_of(error: Exception) -> int:
    """The system's number of an error; libraries in Rust (safetensors) put it into their words. 0: it has none."""
    said = re.search(r"\(os error (\d+)\)", str(error))
    return int(said[1]) if said else getattr(error, "errno", None) or 0


@contextmanager
def aside_of(path: Path) -> Iterator[Path]:
    """Where to write a file before it gets its name; what is there after a failure is removed."""
    aside = path.with_name(f".{path.name}.partial")
    with explained(path):
        try:
            yield aside
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
