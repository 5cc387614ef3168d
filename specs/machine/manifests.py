"""Manifests: the files of a published directory with their digests, and checks that the files are unchanged.

All callers follow one rule. A file counts as unchanged if its size and modification time are those of its last hashing;
any other file is hashed, and its digest noted. The notes are in the directory itself, in `.verified.json`. If they
cannot be written or are lost, files are hashed again, without other effects. Only a full check, which hashes every file
whatever the notes say, finds changes by a failing disk that leave size and time as they were.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from specs.machine.files import aside_of, digest, is_within, read_json

NOTES = ".verified.json"
"""File with {name: [bytes, modification time in ns, SHA-256]}. It is not one of the published files."""
_SETTLED_NS = 100_000_000
"""Age in ns below which a file is not noted, because it may change again within one tick of its file system's clock."""
_WHOLE_FILE = 64 * 2**20
_END = 2**20
"""Number of bytes at each end of a large file that are hashed."""

_noted_here: dict[Path, dict[str, Any]] = {}
"""Notes of directories that this process cannot write to."""


def list_files(directory: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns a manifest's entries for files of a directory, hashed now: {name: {"sha256": hexadecimal, "bytes":
    size}}."""
    notes: dict[str, Any] = {}
    entries = {
        name: {"sha256": _hash(directory, name, notes), "bytes": (directory / name).stat().st_size}
        for name in names
        if Path(name).name != NOTES
    }
    if notes:
        _keep(directory, notes)
    return entries


def find_damage(directory: Path, entries: Mapping[str, Any], *, full: bool = False) -> str:
    """Returns the first difference between a directory's files and the entries of its manifest; empty if they agree.

    Args:
        entries: those of `list_files`; a trainer writes bare digests, without sizes.
        full: whether to hash every file, even if it is noted.
    """
    kept = {} if full else _noted_here.get(directory) or read_json(directory / NOTES)
    notes = dict(kept)
    damage = ""
    for name, entry in entries.items():
        if damage := _file_damage(directory, name, entry, notes):
            break
    if full and damage:
        _forget(directory)
    elif not full and notes != kept:
        _keep(directory, notes)
    return damage


def _file_damage(directory: Path, name: str, entry: Any, notes: dict[str, Any]) -> str:
    expected = entry if isinstance(entry, dict) else {"sha256": entry}
    try:
        return _difference(directory, name, expected, notes)
    except FileNotFoundError:  # or removed in the meantime
        return f"{name} is missing"


def _difference(directory: Path, name: str, expected: Mapping[str, Any], notes: dict[str, Any]) -> str:
    """Returns how a file differs from its entry; empty if it does not. Raises FileNotFoundError if it does not
    exist."""
    if not is_within(name):
        return f"{name} is not one of its files"
    file = directory / name
    if not file.is_file():
        raise FileNotFoundError(file)
    status = file.stat()
    if status.st_size != expected.get("bytes", status.st_size):
        return f"{name} has {status.st_size} bytes instead of {expected['bytes']}"
    match notes.get(name):
        case [status.st_size, status.st_mtime_ns, noted]:
            sha256 = noted
        case _:
            sha256 = _hash(directory, name, notes)
    return "" if sha256 == expected["sha256"] else f"{name} does not match its digest"


def _hash(directory: Path, name: str, notes: dict[str, Any]) -> str:
    """Returns a file's digest, and notes it with the size and time that the file had before it was read."""
    status = (directory / name).stat()
    sha256 = digest(directory / name)
    if time.time_ns() - status.st_mtime_ns > _SETTLED_NS:
        notes[name] = [status.st_size, status.st_mtime_ns, sha256]
    return sha256


def _keep(directory: Path, notes: dict[str, Any]) -> None:
    """Writes the notes. Never creates the directory, because another process may be removing or replacing it."""
    aside = aside_of(directory / NOTES)
    try:
        aside.write_text(json.dumps(notes), encoding="utf-8")
        aside.replace(directory / NOTES)
    except OSError:  # deleted, not writable, or a full disk
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        _noted_here[directory] = notes


def _forget(directory: Path) -> None:
    _noted_here.pop(directory, None)
    with contextlib.suppress(OSError):
        (directory / NOTES).unlink(missing_ok=True)


def directory_digest(directory: Path) -> str:
    """Returns the SHA-256, hexadecimal, of the names and the contents of a directory's files; see `file_digest`."""
    content = hashlib.sha256()
    for file in sorted(directory.rglob("*")):
        if file.is_file() and file.name != NOTES:
            content.update(f"{file.relative_to(directory)}\0{file_digest(file)}\n".encode())
    return content.hexdigest()


def file_digest(file: Path) -> str:
    """Returns the SHA-256, hexadecimal, of a file. For a file larger than 64 MiB it covers the first and the last MiB,
    the size and the modification time, because a model of many gigabytes cannot be read at every plan."""
    status = file.stat()
    return _file_digest(str(file), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _file_digest(path: str, size: int, modified_ns: int) -> str:
    if size <= _WHOLE_FILE:
        return digest(Path(path))
    with open(path, "rb") as file:
        ends = hashlib.sha256(f"{size} {modified_ns} ".encode() + file.read(_END))
        file.seek(-_END, 2)
        ends.update(file.read())
    return ends.hexdigest()
