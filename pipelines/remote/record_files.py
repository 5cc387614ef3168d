"""The files of a home that other machines may read, and the listings by which they notice changes.

The record's files are the documents, logs and segments that the reading verbs and SQL need: never weights or
checkpoints, Prefect's database, the services' secrets or a file still being written. Symbolic links are never followed.
"""

import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RECORD = (
    "experiments/*/experiment.json",
    "experiments/*/spec.json",
    "studies/*/study.json",
    "artifacts/*/*/manifest.json",
    "artifacts/*/*/summary.json",
    "artifacts/*/*/tokenizer.json",
    "runs/*/*.json",
    "runs/*/leases/*.json",
    "runs/*/exits/*.json",
    "runs/*/logs/*.log",
    "runs/*/evaluate/*/manifest.json",
    "runs/*/evaluate/*/summary.json",
    "runs/*/evaluate/*/segments/*/*.parquet",
    "runs/*/segments/*/*.parquet",
    "runs/*/attempts/*.json",
)
"""Paths in a home. A star matches any part of a name that does not begin with a dot.

A run's files are listed in this order: its state before the evaluation that the state names, and segments before the
attempts that recorded them, so that a listing contains all files that its documents and rows refer to.
"""
_UNITS = {"experiments": 2, "studies": 2, "runs": 2, "artifacts": 3}
"""Number of path parts that name a unit, by directory."""


_Pattern = tuple[re.Pattern[str], ...]


def _name_pattern(part: str) -> re.Pattern[str]:
    return re.compile(re.escape(part).replace(r"\*", r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*"))


_PATTERNS = tuple(tuple(map(_name_pattern, path.split("/"))) for path in _RECORD)


class NotRecordedError(Exception):
    """Error for a path that is not a file of the record."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """One file of a listing."""

    size: int
    """Size in bytes."""
    version: str
    """Text that changes whenever the file's content changes."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one unit of the record: a run, an experiment, a study or an artifact."""

    digest: str
    """Text that changes whenever the unit changes."""
    files: Mapping[str, FileVersion]
    """Versions of the files by path in the home."""

    @classmethod
    def of(cls, files: Mapping[str, FileVersion]) -> "Listing":
        """Returns the listing of these files, with its digest."""
        lines = [f"{path}\t{file.size}\t{file.version}\n" for path, file in sorted(files.items())]
        return cls(hashlib.sha256("".join(lines).encode()).hexdigest()[:32], files)

    def without(self, directories: Collection[str]) -> "Listing":
        """Returns the listing of a run without the files in some of its directories."""
        return Listing.of({path: file for path, file in self.files.items() if path.split("/")[2] not in directories})

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        files = {path: [file.size, file.version] for path, file in self.files.items()}
        return {"digest": self.digest, "files": files}

    @classmethod
    def from_json(cls, unit: str, data: Any) -> "Listing":
        """Returns the listing of a unit that another machine sent.

        Raises:
            ValueError: the data are no listing, or name a file that is not of this unit or not of the record at all.
        """
        try:
            files = {path: FileVersion(int(size), str(version)) for path, (size, version) in data["files"].items()}
            digest = str(data["digest"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a listing of the record: {error!r}") from None
        for path in files:
            if not is_recorded(path) or unit_of(path) != unit:
                raise ValueError(f"the listing of {unit!r} names {path!r}, which does not belong to it")
        if not files:
            raise ValueError(f"the listing of {unit!r} is empty")
        return cls(digest, files)


def is_recorded(path: str) -> bool:
    """Returns whether a path, relative to a home and with forward slashes, is a file of the record."""
    parts = path.split("/")
    return any(
        len(pattern) == len(parts) and all(name.fullmatch(part) for name, part in zip(pattern, parts, strict=True))
        for pattern in _PATTERNS
    )


def unit_of(path: str) -> str:
    """Returns the unit that a file of the record belongs to, such as `runs/RUN` or `artifacts/STAGE/FINGERPRINT`."""
    parts = path.split("/")
    return "/".join(parts[: _UNITS[parts[0]]])


def read_listings(root: Path, units: Iterable[str] = ()) -> dict[str, Listing]:
    """Returns the listings of a home's units. A file's version is its modification time.

    Args:
        units: units to list; empty means all. Units that the home does not have are left out.
    """
    chosen = [pattern for unit in units for pattern in _patterns_of(unit)] if units else _PATTERNS
    files_of: dict[str, dict[str, FileVersion]] = {}
    for path, entry in _files(str(root), "", chosen):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        files_of.setdefault(unit_of(path), {})[path] = FileVersion(status.st_size, f"{status.st_mtime_ns:x}")
    return {unit: Listing.of(files) for unit, files in files_of.items()}


def open_recorded(root: Path, path: str) -> int:
    """Opens a file of the record for reading and returns its descriptor, which the caller closes.

    Raises:
        NotRecordedError: the path is not a file of the record, does not exist, or contains a link.
    """
    if not is_recorded(path):
        raise NotRecordedError(path)
    *directories, name = path.split("/")
    try:
        directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Directory by directory, so that none can become a link between a check and its use.
            for part in directories:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
                os.close(directory)
                directory = inner
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise NotRecordedError(path) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotRecordedError(path)
    return file


def _patterns_of(unit: str) -> Iterator[_Pattern]:
    """Yields the patterns of the files of one unit."""
    names = [re.compile(re.escape(part)) for part in unit.split("/")]
    for pattern in _PATTERNS:
        if len(names) < len(pattern) and all(
            whole.fullmatch(part) for whole, part in zip(pattern, unit.split("/"), strict=False)
        ):
            yield (*names, *pattern[len(names) :])


def _files(directory: str, prefix: str, patterns: Sequence[_Pattern]) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """Yields the files below a directory that match patterns relative to it, each as its path in the home and its
    directory entry."""
    try:
        with os.scandir(directory) as scanned:
            entries = [(rest, entry) for entry in scanned if (rest := _inside(patterns, entry.name))]
    except (FileNotFoundError, NotADirectoryError):
        return
    for rest, entry in sorted(entries, key=lambda item: min(item[0])):
        path, inner = f"{prefix}{entry.name}", [pattern for pattern in rest.values() if pattern]
        if len(inner) < len(rest) and entry.is_file(follow_symlinks=False):
            yield path, entry
        elif inner and entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path, f"{path}/", inner)


def _inside(patterns: Sequence[_Pattern], name: str) -> dict[int, _Pattern]:
    """Returns the rest of each pattern whose first part matches this name, by the pattern's index."""
    return {place: pattern[1:] for place, pattern in enumerate(patterns) if pattern[0].fullmatch(name)}
