"""The store as its readers see it: SQL in, rows out."""

import contextlib
import decimal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import pyarrow as pa
from filelock import Timeout

from storage.errors import QueryError, explain, is_about_files
from storage.ingest import Ingested, ingest
from storage.snapshot import Snapshot, find_damage

_READING = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN, duckdb.StatementType.CALL}
_ATTEMPTS = 8
"""At a query: files may go away between the look at the directories and the reading."""
_MOST_UNKNOWN = 20
"""Units that a reader reads itself; where there are more, it has them ingested."""
_MOVED = "a file was removed while it was being queried: earlier answers were of an earlier moment than this one"


@dataclass(frozen=True)
class Result:
    """The answer to a query."""

    table: pa.Table
    warnings: tuple[str, ...] = ()
    """Segments that were left out because they are damaged, one line each, and whether the snapshot moved on."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns' names in order. Two may be equal."""
        return tuple(self.table.column_names)

    @cached_property
    def rows(self) -> list[tuple[Any, ...]]:
        """The rows as plain Python values. Times are UTC, with their time zone."""
        if not self.table.num_columns:
            return []
        return list(zip(*(column.to_pylist() for column in self.table.columns), strict=True))

    def arrow(self) -> pa.Table:
        """The answer as an Arrow table."""
        return self.table


class Store:
    """Everything recorded under one home directory, ingested or not, as it was at one moment.

    The first query takes a snapshot, and every query sees that moment until `refresh` or `close`. Nobody waits
    meanwhile: runs go on recording, and an ingester replaces the database's file without touching the one that is held.
    Only what is deleted cannot be read any more: if a query meets a file that is gone, the snapshot is taken anew, and
    the warnings of every later result say so. Threads may share a store; their queries run one after another.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self._snapshot: Snapshot | None = None
        self._answered = False
        """Whether a query was answered since the store was opened or refreshed."""
        self._moved = False
        """Whether the snapshot was taken anew since then."""
        self._turn = threading.Lock()

    @classmethod
    def open(cls, home_root: Path) -> "Store":
        """A home that holds nothing yet has all tables, empty."""
        return cls(home_root)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the snapshot. A query after it takes another."""
        self.refresh()

    def refresh(self) -> None:
        """From here on queries see a later moment: that of the next query."""
        with self._turn:
            self._drop_snapshot()
            self._answered = self._moved = False

    def query(self, sql: str, params: Sequence[object] | Mapping[str, object] = ()) -> Result:
        """Runs one statement that reads.

        Raises:
            QueryError: the statement is wrong, does not read, or touches what is not recorded here.
        """
        with self._turn:
            return self._query(sql, params)

    def ingest(self) -> Ingested:
        """Loads what is not in the database yet; waits for another ingester. The snapshot stays as it is."""
        return ingest(self.root)

    def _query(self, sql: str, params: Sequence[object] | Mapping[str, object]) -> Result:
        damaged: dict[str, str] = {}
        for _ in range(_ATTEMPTS):
            snapshot = self._snapshot or self._take_snapshot(damaged)
            try:
                table = _run(snapshot, sql, params)
            except duckdb.Error as error:
                cause = error
                # A file was deleted or merged meanwhile, and the directories say what holds now; or it is damaged.
                damaged |= find_damage(snapshot, sql, error)
                self._drop_snapshot()
            else:
                self._answered = True
                moved = (_MOVED,) if self._moved else ()
                return Result(_plain_integers(table), (*snapshot.warnings, *moved))
        raise QueryError(f"{cause}\n  hint: `rpg db check` says what is damaged") from cause

    def _take_snapshot(self, damaged: Mapping[str, str]) -> Snapshot:
        snapshot = Snapshot(self.root, damaged=damaged)
        if snapshot.num_unknown > _MOST_UNKNOWN:
            with contextlib.suppress(Timeout, OSError, duckdb.Error):  # another one does, or the home is read-only
                snapshot.close()
                ingest(self.root, wait_seconds=0)
            snapshot = Snapshot(self.root, damaged=damaged)
        self._moved |= self._answered
        self._snapshot = snapshot
        return snapshot

    def _drop_snapshot(self) -> None:
        if self._snapshot:
            self._snapshot.close()
            self._snapshot = None


def _run(snapshot: Snapshot, sql: str, params: Sequence[object] | Mapping[str, object]) -> pa.Table:
    """Raises QueryError for what the statement gets wrong, duckdb.Error where a file may be at fault."""
    connection = snapshot.connection
    try:
        snapshot.provide(sql)
        # Rolled back, so that a type or a table that a statement makes on its way is not there for the next one.
        connection.begin()
        try:
            _require_reading(connection, sql)
            relation = connection.sql(sql, params=params or None)
            return relation.to_arrow_table() if relation is not None else pa.table({})
        finally:
            connection.rollback()
    except duckdb.Error as error:
        if is_about_files(error):
            raise
        snapshot.provide_all()
        raise QueryError(explain(connection, error)) from error


def _require_reading(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raises QueryError unless the text is one statement that reads. (PIVOT is a SELECT that first creates a type.)"""
    kinds = [statement.type for statement in connection.extract_statements(sql)]
    if not kinds:
        raise QueryError("the query is empty")
    *first, last = kinds
    if first and not set(first) <= {duckdb.StatementType.CREATE}:
        raise QueryError("more than one statement; give them one at a time")
    if last not in _READING:
        raise QueryError(
            f"{last.name} is not a query: what is recorded can only be read (SELECT, DESCRIBE, EXPLAIN, ...)"
        )


def _plain_integers(table: pa.Table) -> pa.Table:
    """Makes 64-bit integers of the 38-digit decimals that DuckDB's sums of integers are, where they fit."""
    for index, field in enumerate(table.schema):
        if pa.types.is_decimal(field.type) and field.type.precision == 38 and field.type.scale == 0:
            try:
                table = table.set_column(index, field.name, table.column(index).cast(pa.int64()))
            except (pa.ArrowInvalid, decimal.DecimalException):
                continue
    return table
