"""Segments, the Parquet files that trainers and evaluators leave: listing, checking and reading them."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specs.records import TABLES
from storage.columns import EVALUATED, arrow_schema

_TRAIN_NAME = re.compile(r"a(\d+)-s(\d+)-(\d+)\.parquet")
_FINGERPRINT = re.compile(r"[0-9a-f]+")


class BadSegmentError(Exception):
    """A file cannot be read as a segment of its table. The message says why."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One file. A published segment never changes: while path, size and time are the same, so are the rows."""

    key: str
    """Path relative to the home directory, with forward slashes."""
    table: str
    run_id: str
    num_bytes: int
    modified_ns: int
    """Time of change, by the file system's clock: compared for equality only."""

    @property
    def identity(self) -> tuple[str, int, int]:
        """Differs between this file and another one that was written later under the same name."""
        return self.key, self.num_bytes, self.modified_ns


def run_directories(root: Path) -> list[Path]:
    """Every run's directory, by name."""
    return [Path(entry.path) for entry in _entries(root / "runs") if entry.is_dir()]


def scan(root: Path) -> list[Segment]:
    """Every segment on disk, ordered by path. Files that are not named like one: see `misnamed_files`."""
    return [segment for segment, is_segment in _candidates(root) if is_segment]


def misnamed_files(root: Path) -> list[str]:
    """Paths, relative to the home, of files that lie where segments lie and are not named like one."""
    return [segment.key for segment, is_segment in _candidates(root) if not is_segment]


@lru_cache(maxsize=2**17)
def inspect(root: Path, segment: Segment) -> tuple[int, bool]:
    """Reads a segment's footer; once in a process, as a segment never changes.

    Returns:
        The number of rows, and whether the columns are exactly today's.
    Raises:
        BadSegmentError: the file is truncated or no Parquet, or its columns or its run are wrong.
        FileNotFoundError: the file was deleted meanwhile.
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
    """All rows of a segment, with today's columns; a column that an older file lacks is NULL.

    Raises:
        BadSegmentError: as for `inspect`, or the data are damaged.
        FileNotFoundError: the file was deleted meanwhile.
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
        for table in TABLES:
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
    """A directory's entries by name, without hidden ones: those are still being written."""
    try:
        with os.scandir(directory) as entries:
            published = (e for e in entries if not e.name.startswith(".") and not e.name.endswith(".tmp"))
            return sorted(published, key=_name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _name(entry: "os.DirEntry[str]") -> str:
    return entry.name


def _require_columns(schema: pa.Schema, expected: pa.Schema) -> None:
    for name in ("run_id", "step"):
        if name not in schema.names:
            raise BadSegmentError(f"foreign: it has no column `{name}`")
    for field in schema:
        if field.name in expected.names and not _fits(field.type, expected.field(field.name).type):
            wanted = expected.field(field.name).type
            raise BadSegmentError(f"foreign: column `{field.name}` is {field.type}, expected {wanted}")


def _fits(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of the first type can stand in a column of the second."""
    families = (_is_number, pa.types.is_boolean, pa.types.is_timestamp, _is_text)
    return bool(pa.types.is_null(kind)) or any(family(kind) and family(wanted) for family in families)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


def _require_run(file: pq.ParquetFile, run_id: str) -> None:
    """Raises unless the first rows are of the run in whose directory the file lies; by its statistics if it has any."""
    if not file.metadata.num_rows:
        return
    group = file.metadata.row_group(0)
    columns = (group.column(index) for index in range(group.num_columns))
    statistics = next(column.statistics for column in columns if column.path_in_schema == "run_id")
    if statistics is not None and statistics.has_min_max:
        run_ids = [statistics.min, statistics.max]
    else:
        run_ids = pc.unique(file.read_row_group(0, columns=["run_id"]).column(0)).to_pylist()
    for other in run_ids:
        if other != run_id:
            raise BadSegmentError(f"foreign: it has rows of run `{other}`")


def _same_columns(schema: pa.Schema, expected: pa.Schema) -> bool:
    """Whether names and types agree; whether a column may be NULL does not matter to a reader."""
    return [(field.name, field.type) for field in schema] == [(field.name, field.type) for field in expected]


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    if field.name not in table.column_names:
        return pa.nulls(len(table), field.type)
    return table.column(field.name).cast(field.type)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
