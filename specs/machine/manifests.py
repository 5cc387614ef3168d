"""Manifests: the files of a published directory with their digests, and whether the files still are those.

One rule for all who ask. A file that has the size and the time of change that it had when it was last hashed counts as
unchanged; any other file is hashed, and its digest noted. The notes lie in the directory itself, in `.verified.json`;
where they cannot be written or are lost, files are hashed again and nothing else happens. Only a check in full, which
hashes every file whatever is noted, finds what a failing disk changed without changing size or time.
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
"""{file: [bytes, time of change in ns, SHA-256]}: no part of what is published."""
_SETTLED_NS = 100_000_000
"""A file younger than this may change again within one tick of its file system's clock: it is not noted yet."""
_WHOLE_FILE = 64 * 2**20
_END = 2**20
"""Bytes at each end of a larger file that are hashed."""

_noted_here: dict[Path, dict[str, Any]] = {}
"""Notes of directories that this process cannot write to."""


def list_files(directory: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A manifest's entries for files of a directory, hashed now: {name: {"sha256": hexadecimal, "bytes": size}}."""
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
    """The first difference between a directory's files and the entries of its manifest; empty where there is none.

    Args:
        entries: as `list_files` gives them; those written by a trainer are bare digests, of which no size is known.
        full: hash every file, noted or not.
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
    except FileNotFoundError:  # or removed meanwhile
        return f"{name} is missing"


def _difference(directory: Path, name: str, expected: Mapping[str, Any], notes: dict[str, Any]) -> str:
    """Raises FileNotFoundError where there is no such file."""
    if not is_within(name):
        return f"{name} is not a file of it"
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
    """A file's digest, noted with the size and time that it had before it was read."""
    status = (directory / name).stat()
    sha256 = digest(directory / name)
    if time.time_ns() - status.st_mtime_ns > _SETTLED_NS:
        notes[name] = [status.st_size, status.st_mtime_ns, sha256]
    return sha256


def _keep(directory: Path, notes: dict[str, Any]) -> None:
    """Writes the notes; never makes the directory, which another process may be removing or replacing."""
    aside = aside_of(directory / NOTES)
    try:
        aside.write_text(json.dumps(notes), encoding="utf-8")
        aside.replace(directory / NOTES)
    except OSError:  # gone, not ours to write to, or a full disk
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        _noted_here[directory] = notes


def _forget(directory: Path) -> None:
    _noted_here.pop(directory, None)
    with contextlib.suppress(OSError):
        (directory / NOTES).unlink(missing_ok=True)


def directory_digest(directory: Path) -> str:
    """SHA-256, hexadecimal, of the names and the contents of a directory's files; see `file_digest`."""
    content = hashlib.sha256()
    for file in sorted(directory.rglob("*")):
        if file.is_file() and file.name != NOTES:
            content.update(f"{file.relative_to(directory)}\0{file_digest(file)}\n".encode())
    return content.hexdigest()


def file_digest(file: Path) -> str:
    """SHA-256, hexadecimal, of a file. Of one beyond 64 MiB the first and the last MiB are hashed, with its size and
    its time of change: a model of many gigabytes cannot be read at every plan."""
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
