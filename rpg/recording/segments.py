"""Writes a run's rows as Parquet segments. Each file is complete and durable before it gets its name, and never changes
afterwards."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specs.machine.files import aside_of, explained, sync
from specs.records import LARGE_TABLES, TABLES, EventRow, Float32, Int32
from specs.secrets import hide
from specs.segment_names import DigestedFile, SegmentName

_ARROW = {
    int: pa.int64(),
    float: pa.float64(),
    Float32: pa.float32(),
    Int32: pa.int32(),
    str: pa.string(),
    bool: pa.bool_(),
    datetime: pa.timestamp("us", tz="UTC"),
}
_NAMES = {row: table for table, row in TABLES.items()}


def schema_of(row: type) -> pa.Schema:
    """Returns the Arrow schema of a row class of specs/records.py."""
    return pa.schema([_field(name, hint) for name, hint in get_type_hints(row).items()])


def _field(name: str, hint: Any) -> pa.Field:
    choices = get_args(hint)
    kind = next((choice for choice in choices if choice is not NoneType), hint)
    return pa.field(name, _ARROW[kind], nullable=NoneType in choices)


class SegmentWriter:
    """A writer that collects rows and writes them to `segments/<table>/` under the names of `SegmentName`.

    Every row gets the run's id and the attempt. A table has at most one segment per flush; nothing is on disk before a
    flush. Each rank writes its share of large tables, even an empty one: their rows count once all shares are on disk.
    """

    def __init__(self, run_dir: Path, run_id: str, attempt: int, *, rank: int = 0, ranks: int = 1) -> None:
        """Opens a run's segments. `rank`: index of this rank among the `ranks` that write large tables."""
        self.run_id = run_id
        self.attempt = attempt
        self._root = run_dir / "segments"
        self._constants = {"run_id": run_id, "attempt": attempt}
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="segments")
        self._rank, self._ranks = rank, ranks
        self._pending: dict[str, list[pa.Table]] = {}
        self._steps: dict[str, set[int]] = {}
        self._schemas = {table: schema_of(row) for table, row in TABLES.items()}

    def columns(self, row: type, columns: Mapping[str, Any]) -> None:
        """Adds many rows at once, column by column.

        Args:
            row: a row class of specs/records.py.
            columns: every field but run_id and attempt: an array or list of values, or one value for all the rows; at
                least one column must be an array or list; a str is one value.
        """
        table = _NAMES[row]
        schema = self._schemas[table]
        length = next(len(column) for column in columns.values() if _is_column(column))
        given: dict[str, Any] = {**self._constants, **columns}
        arrays = [_array(given[name], schema.field(name).type, length) for name in schema.names]
        self._add(table, pa.Table.from_arrays(arrays, schema=schema), np.atleast_1d(columns["step"]).tolist())

    def rows(self, rows: Iterable[Any]) -> None:
        """Adds rows of one class."""
        listed = list(rows)
        if listed:
            table = _NAMES[type(listed[0])]
            schema = self._schemas[table]
            columns = {name: [getattr(row, name) for row in listed] for name in schema.names}
            self._add(table, pa.Table.from_pydict(columns, schema=schema), columns["step"])

    def event(self, step: int, kind: str, message: str) -> None:
        """Adds a row about an event of the run. Secrets in the message are removed."""
        now = datetime.now(UTC)
        self.columns(EventRow, {"step": [step], "kind": kind, "message": hide(message), "recorded_at": now})

    def flush(self) -> None:
        """Writes and syncs the rows added since the last flush. Tables are written in parallel, because syncing is
        mostly waiting."""
        list(self._threads.map(self._write, self._pending))
        self._pending.clear()
        self._steps.clear()

    def _add(self, table: str, rows: pa.Table, steps: Iterable[int]) -> None:
        self._pending.setdefault(table, []).append(rows)
        self._steps.setdefault(table, set()).update(steps)

    def _write(self, table: str) -> None:
        steps = self._steps[table]
        name = SegmentName(False, self.attempt, min(steps), max(steps), "")
        if table in LARGE_TABLES:
            name = replace(name, rank=self._rank, ranks=self._ranks)
        _publish(self._root / table, name, pa.concat_tables(self._pending[table]))


def _is_column(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str)


def _array(value: Any, kind: pa.DataType, length: int) -> pa.Array:
    if _is_column(value):
        return value if isinstance(value, pa.Array) else pa.array(value, type=kind)
    return pa.repeat(pa.scalar(value, type=kind), length)


def _publish(directory: Path, name: SegmentName, rows: pa.Table) -> None:
    """Writes a segment to a temporary file, then renames it. The final name contains a digest of the content."""
    with explained(directory / str(name)):
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.glob(f"{str(name).removesuffix('.parquet')}*")):
            raise FileExistsError(f"{directory / str(name)} is written already; a segment is never changed")
        aside = aside_of(directory / str(name))
        try:
            with DigestedFile(aside) as file:
                compact = {"compression": "zstd", "use_dictionary": ["run_id"]}
                pq.write_table(rows, file, write_statistics=["run_id", "step"], **compact)
                os.fsync(file.fileno())
                digest = file.digest
            aside.replace(directory / str(replace(name, digest=digest)))
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync(directory)
