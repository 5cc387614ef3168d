"""Files: atomic and durable writes, lenient reads, digests, and clear errors for a full or failing disk."""

import errno
import hashlib
import json
import os
import pwd
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specs.documents.reading import read_document

_REASONS = {
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the system allows",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the device failed",
}


class DiskError(RuntimeError):
    """Error for a failed write. Earlier content on the disk is intact."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Converts a disk error into a DiskError that names the place and the remedy. Other errors pass through."""
    try:
        yield
    except Exception as error:
        reason = _REASONS.get(_errno_of(error))
        if reason is None:
            raise
        hint = "after fixing that, `rpg resume` continues from the last whole checkpoint"
        raise DiskError(f"cannot write {path}: {reason}; {hint}") from error


def _errno_of(error: Exception) -> int:
    """Returns the system's error number; 0 if the error has no number. Libraries in Rust (safetensors) put it into the
    message."""
    in_message = re.search(r"\(os error (\d+)\)", str(error))
    return int(in_message[1]) if in_message else getattr(error, "errno", None) or 0


def aside_of(path: Path) -> Path:
    """Returns a new hidden path next to this one, to write to first. It is random, since processes of two containers
    may have the same pid."""
    return path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(8)}.partial")


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary path to write to. Its file is then renamed to `path`; after an error nothing changes.

    A reader of `path` sees the old file or the new one, never a part. Missing directories are created.

    Args:
        durable: whether the new file must survive a power cut.
    Raises:
        DiskError: the disk refused.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = aside_of(path)
        try:
            yield aside
            if durable:
                sync(aside)
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        if durable:
            sync(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = True, allow_nan: bool = False) -> None:
    """Writes JSON atomically; see `replacing`. Raises ValueError for a NaN or an infinity that is not allowed."""
    with replacing(path, durable=durable) as aside, aside.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=allow_nan)


def create_json(path: Path, value: Any) -> None:
    """Writes JSON to a new file. If several processes try at once, one succeeds.

    Raises:
        FileExistsError: the file exists; it is not changed.
        DiskError: the disk refused.
    """
    aside = aside_of(path)
    write_json(aside, value)
    try:
        os.link(aside, path)
    finally:
        aside.unlink()
    sync(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file, as `read_document` reads it; empty if the file is missing, incomplete, or does not
    contain an object."""
    return read_document(path)


def publish_directory(aside: Path, final: Path) -> None:
    """Makes a filled directory durable and renames it to its final name, replacing a directory of that name."""
    sync_tree(aside)
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    aside.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    sync(final.parent)


def sync(path: Path) -> None:
    """Waits until a file's content, or a directory's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Waits until a directory and everything below it is on disk."""
    for path in [directory, *directory.rglob("*")]:
        if path.is_file() or path.is_dir():
            sync(path)


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_within(name: str) -> bool:
    """Returns whether a recorded relative path stays within its directory, judged by its text alone."""
    return bool(name) and not Path(name).is_absolute() and ".." not in Path(name).parts and "\0" not in name


def files_under(directory: Path) -> list[Path]:
    """Returns every file below a directory, in a fixed order."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def user_name(user: int) -> str:
    """Returns the name of a user's account; the id if the account has none."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def now(timespec: str = "milliseconds") -> str:
    """Returns the time, UTC, in ISO-8601; `timespec` is that of `datetime.isoformat`."""
    return datetime.now(UTC).isoformat(timespec=timespec)


def versions_of(*packages: str) -> dict[str, str]:
    """Returns the installed versions of packages; packages that are not installed are left out."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
