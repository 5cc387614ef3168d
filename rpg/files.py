"""A disk that takes no more: said so that a user knows what to do, and nothing half written left behind."""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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


def versions_of(*packages: str) -> dict[str, str]:
    """The installed versions of packages; one that is not installed is left out."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def replace_json(path: Path, value: Any, *, durable: bool) -> None:
    """Writes JSON so that a reader sees the old or the new, never a part; durable: it also survives a power cut."""
    with aside_of(path) as aside:
        with aside.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    if durable:
        sync_directory(path.parent)


def now(timespec: str = "milliseconds") -> str:
    """The time, UTC, as ISO-8601; `timespec` as of `datetime.isoformat`."""
    return datetime.now(UTC).isoformat(timespec=timespec)


def digest(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_under(directory: Path) -> list[Path]:
    """Every file, in a fixed order."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def sync_files(directory: Path) -> None:
    """Makes every file and directory under a directory durable."""
    for path in files_under(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for path in [directory, *(child for child in directory.rglob("*") if child.is_dir())]:
        sync_directory(path)


def publish_directory(aside: Path, final: Path) -> None:
    """Makes a filled directory durable and gives it its name, in the place of one that may have it."""
    sync_files(aside)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    sync_directory(final.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
