"""Segments, the Parquet files with a run's rows, as listed in the directories."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specs.documents.names import is_readable_name
from specs.records import EVALUATED, TABLES
from specs.segment_names import SegmentName, parse_segment_name

_FINGERPRINT = re.compile(r"[0-9a-f]+")


class BadSegmentError(Exception):
    """Error for a file that cannot be read as a segment of its table. The message says why."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One file. A published segment never changes."""

    key: str
    """Path relative to the home directory, with forward slashes."""
    table: str
    run_id: str
    num_bytes: int
    modified_ns: int
    """Modification time, by the file system's clock."""

    @property
    def name(self) -> str:
        """The file's name."""
        return self.key.rpartition("/")[2]

    @property
    def parsed(self) -> SegmentName:
        """Returns the parts of the file's name; empty for a file of an evaluate stage, whose name has none."""
        return parse_segment_name(self.name) or SegmentName(False, 0, 0, 0, "")

    @property
    def is_of_evaluate_stage(self) -> bool:
        """Whether an evaluate stage, and not the trainer, published the file."""
        return "/evaluate/" in self.key

    def is_as(self, other: "Segment") -> bool:
        """Returns whether this file is the same as an earlier one, judged by the digest in its name, else by its
        modification time."""
        here, before = (self.key, self.num_bytes), (other.key, other.num_bytes)
        return here == before and bool(self.parsed.digest or self.modified_ns == other.modified_ns)


def run_segments(root: Path, run_id: str) -> list[Segment]:
    """Returns all files of a run that have a segment's name, ordered by path, including those that were merged into
    others."""
    return [segment for segment, is_named in _candidates(root, run_id) if is_named]


def misnamed_files(root: Path, run_id: str) -> list[str]:
    """Returns the paths, relative to the home, of files in a run's segment directories that do not have a segment's
    name."""
    return [segment.key for segment, is_named in _candidates(root, run_id) if not is_named]


def _candidates(root: Path, run_id: str) -> Iterator[tuple[Segment, bool]]:
    run = root / "runs" / run_id
    for table in TABLES:
        for entry in entries(run / "segments" / table):
            yield _segment(root, entry, table, run_id), parse_segment_name(entry.name) is not None
    for stage in entries(run / "evaluate"):
        if not _FINGERPRINT.fullmatch(stage.name):
            continue  # a directory that is still being written
        for table in EVALUATED:
            for entry in entries(Path(stage.path) / "segments" / table):
                is_named = is_readable_name(entry.name) and entry.name.endswith(".parquet")
                yield _segment(root, entry, table, run_id), is_named


def _segment(root: Path, entry: "os.DirEntry[str]", table: str, run_id: str) -> Segment:
    try:
        stat = entry.stat()
        size, modified = stat.st_size, stat.st_mtime_ns
    except FileNotFoundError:
        size, modified = -1, 0
    return Segment(entry.path[len(str(root)) + 1 :].replace(os.sep, "/"), table, run_id, size, modified)


def entries(directory: Path) -> "list[os.DirEntry[str]]":
    """Returns a directory's entries by name, without hidden ones, which are still being written."""
    try:
        with os.scandir(directory) as scanned:
            published = (e for e in scanned if not e.name.startswith(".") and not e.name.endswith(".tmp"))
            return sorted(published, key=_name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _name(entry: "os.DirEntry[str]") -> str:
    return entry.name
