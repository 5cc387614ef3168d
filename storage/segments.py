"""Segments, the Parquet files that trainers and evaluators leave: finding them, and telling the good from the bad."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.columns import EVALUATED, TRAINED, arrow_schema

_TRAIN_NAME = re.compile(r"a(\d+)-s(\d+)-(\d+)\.parquet")
_FINGERPRINT = re.compile(r"[0-9a-f]+")


class BadSegmentError(Exception):
    """A file that cannot be read as a segment of its table; `str()` says why."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One file. A segment never changes once it is published: same path, size and time, same rows."""

    key: str
    """Path relative to the home directory, with forward slashes."""
    table: str
    run_id: str
    num_bytes: int
    modified_ns: int
    """Of the file's clock; part of the identity only, never compared for order."""

    @property
    def identity(self) -> tuple[str, int, int]:
        """Tells this file from another that was written later under the same name."""
        return self.key, self.num_bytes, self.modified_ns


def run_directories(root: Path) -> list[Path]:
    """Every run's directory, by name."""
    return [Path(entry.path) for entry in _entries(root / "runs") if entry.is_dir()]


def scan(root: Path) -> list[Segment]:
    """Every segment on disk, ordered by path. Files with other names are not segments: see `strangers`."""
    return [segment for segment, is_segment in _candidates(root) if is_segment]


def strangers(root: Path) -> list[str]:
    """Paths, relative to the home, of files that lie where segments lie and are not named like one."""
    return [segment.key for segment, is_segment in _candidates(root) if not is_segment]


@lru_cache(maxsize=2**17)
def inspect(root: Path, segment: Segment) -> tuple[int, bool]:
    """Reads the footer (once in a process: a segment never changes).

    Returns the number of rows, and whether the columns are exactly today's.

    Raises:
        BadSegmentError: truncated, no Parquet, or the columns or the run are not what they should be.
        FileNotFoundError: the file went away meanwhile.
    """
    try:
        with pq.ParquetFile(root / segment.key) as file:
            _require_columns(file.schema_arrow, arrow_schema(segment.table))
            _require_run(file, segment.run_id)
            return file.metadata.num_rows, _same_columns(file.schema_arrow, arrow_schema(segment.table))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise BadSegmentError(f"not a whole Parquet file: {_first_line(error)}") from error


def read(root: Path, segment: Segment) -> pa.Table:
    """All rows, with today's columns; those an older file lacks are NULL.

    Raises:
        BadSegmentError: as for `inspect`, or the data between the footers is damaged.
        FileNotFoundError: the file went away meanwhile.
    """
    inspect(root, segment)
    expected = arrow_schema(segment.table)
    try:
        with pq.ParquetFile(root / segment.key) as file:
            table = file.read()
        arrays = [_column(table, field) for field in expected]
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise BadSegmentError(f"damaged: {_first_line(error)}") from error
    return pa.Table.from_arrays(arrays, schema=expected)


def _candidates(root: Path) -> Iterator[tuple[Segment, bool]]:
    for run in run_directories(root):
        for table in TRAINED:
            for entry in _entries(run / "segments" / table):
                yield _segment(root, entry, table, run.name), bool(_TRAIN_NAME.fullmatch(entry.name))
        for stage in _entries(run / "evaluate"):
            if not _FINGERPRINT.fullmatch(stage.name):
                continue  # a directory still being filled
            for table in EVALUATED:
                for entry in _entries(Path(stage.path) / "segments" / table):
                    yield _segment(root, entry, table, run.name), entry.name.endswith(".parquet")


def _segment(root: Path, entry: "os.DirEntry[str]", table: str, run_id: str) -> Segment:
    try:
        stat = entry.stat()
        size, modified = stat.st_size, stat.st_mtime_ns
    except FileNotFoundError:
        size, modified = -1, 0
    return Segment(entry.path[len(str(root)) + 1 :].replace(os.sep, "/"), table, run_id, size, modified)


def _entries(directory: Path) -> "list[os.DirEntry[str]]":
    """What a directory holds, by name; dot files and files being written aside are not there yet."""
    try:
        with os.scandir(directory) as found:
            return sorted((e for e in found if not e.name.startswith(".") and not e.name.endswith(".tmp")), key=_name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _name(entry: "os.DirEntry[str]") -> str:
    return entry.name


def _require_columns(found: pa.Schema, expected: pa.Schema) -> None:
    for name in ("run_id", "step"):
        if name not in found.names:
            raise BadSegmentError(f"foreign: it has no column `{name}`")
    for field in found:
        if field.name in expected.names and not _fits(field.type, expected.field(field.name).type):
            wanted = expected.field(field.name).type
            raise BadSegmentError(f"foreign: column `{field.name}` is {field.type}, expected {wanted}")


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of one type can stand in a column of the other."""
    families = (_is_number, pa.types.is_boolean, pa.types.is_timestamp, _is_text)
    return bool(pa.types.is_null(found)) or any(family(found) and family(wanted) for family in families)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


def _require_run(file: pq.ParquetFile, run_id: str) -> None:
    """The first rows must be of the run in whose directory the file lies: by the file's statistics, or as they are."""
    if not file.metadata.num_rows:
        return
    group = file.metadata.row_group(0)
    columns = (group.column(index) for index in range(group.num_columns))
    statistics = next(column.statistics for column in columns if column.path_in_schema == "run_id")
    if statistics is not None and statistics.has_min_max:
        found = [statistics.min, statistics.max]
    else:
        found = pc.unique(file.read_row_group(0, columns=["run_id"]).column(0)).to_pylist()
    for seen in found:
        if seen != run_id:
            raise BadSegmentError(f"foreign: it has rows of run `{seen}`")


def _same_columns(found: pa.Schema, expected: pa.Schema) -> bool:
    """By name and type; whether a column may be NULL does not matter to a reader."""
    return [(field.name, field.type) for field in found] == [(field.name, field.type) for field in expected]


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    if field.name not in table.column_names:
        return pa.nulls(len(table), field.type)
    return table.column(field.name).cast(field.type)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
