"""The store for its readers: SQL in, rows out."""

import contextlib
import decimal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import duckdb
from filelock import Timeout

from storage.errors import QueryError
from storage.snapshot import Snapshot, find_damage
from storage.statements.limits import DEFAULT_LIMITS, Limits, confine
from storage.statements.statement import Params, Statement
from storage.statements.texts import Form

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa

    from storage.ingest import Ingested

_Answer = TypeVar("_Answer")
_ATTEMPTS = 8
"""Number of attempts of a query, because files may disappear after the directories were listed."""
_MOST_UNKNOWN = 20
"""Largest number of units that a reader reads itself. If there are more, it starts an ingest."""
_MOVED = "a file was removed during a query; this answer shows a later moment than earlier answers"


@dataclass(frozen=True)
class Result:
    """The answer to a query."""

    table: "pa.Table"
    warnings: tuple[str, ...] = ()
    """A line for each segment that was left out because it is damaged, and a line if the snapshot was renewed."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the names of the columns, in order. Names may repeat."""
        return tuple(self.table.column_names)

    @cached_property
    def rows(self) -> list[tuple[Any, ...]]:
        """Returns the rows as plain Python values. Times are UTC, with their time zone."""
        if not self.table.num_columns:
            return []
        return list(zip(*(column.to_pylist() for column in self.table.columns), strict=True))

    def arrow(self) -> "pa.Table":
        """Returns the answer as an Arrow table."""
        return self.table

    def df(self) -> "pandas.DataFrame":
        """Returns the answer as a pandas data frame. Raises ImportError if pandas is not installed."""
        _require("pandas")
        return self.table.to_pandas()

    def pl(self) -> "polars.DataFrame":
        """Returns the answer as a Polars data frame. Raises ImportError if Polars is not installed."""
        _require("polars")
        import polars

        return polars.from_arrow(self.table)


@dataclass(frozen=True)
class Stream:
    """The answer to a query as a stream. Its rows can be read once, in one of three forms."""

    _statement: Statement
    warnings: tuple[str, ...]
    """Warnings, see `Result`."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the names of the columns, in order. Names may repeat."""
        return self._statement.columns

    def rows(self) -> Iterator[list[tuple[Any, ...]]]:
        """Returns the rows as plain Python values, a few thousand at a time. Times are UTC, with their time zone."""
        return self._statement.rows()

    def texts(self) -> Iterator[list[str]] | None:
        """Returns the rows as text, without line ends between them; None if DuckDB does not write them as text."""
        if not self._statement.is_text:
            return None
        return ([text for (text,) in rows] for rows in self._statement.rows())

    def batches(self) -> "tuple[pa.Schema, Iterator[pa.RecordBatch]]":
        """Returns the rows as Arrow batches, and the columns' types."""
        return self._statement.batches()


class Store:
    """Everything that is recorded under one home directory, ingested or not, in its state at one moment.

    The first query takes a snapshot, and every query sees that moment until `refresh` or `close`. No process waits
    meanwhile: runs continue recording, and an ingester replaces the database's file without touching the open one. Only
    deleted files cannot be read any more: if a query meets one, a new snapshot is taken, and the warnings of every
    later result say so. Threads may share a store; their queries run one after another.
    """

    def __init__(self, root: Path, limits: Limits = DEFAULT_LIMITS) -> None:
        self.root = Path(root).absolute()
        self.limits = limits
        self._snapshot: Snapshot | None = None
        self._statement: Statement | None = None
        """The last statement on the snapshot's connection."""
        self._remove_scratch: Callable[[], object] = lambda: None
        """Removes the temporary files of the snapshot's connection."""
        self._answered = False
        """Whether a query has been answered since the store was opened or refreshed."""
        self._moved = False
        """Whether a new snapshot was taken since then."""
        self._turn = threading.Lock()

    @classmethod
    def open(cls, home_root: Path, limits: Limits = DEFAULT_LIMITS) -> "Store":
        """Returns the store of a home. An empty home has all tables, empty. The limits apply to each query."""
        return cls(home_root, limits)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the snapshot. A later query takes another."""
        self.refresh()

    def refresh(self) -> None:
        """Moves to a later state: that of the next query."""
        with self._turn:
            self._drop_snapshot()
            self._answered = self._moved = False

    def query(self, sql: str, params: Params = ()) -> Result:
        """Runs one read-only statement.

        Raises:
            QueryError: the statement is wrong, is not read-only, reads outside the record, or exceeds a limit.
        """
        with self._alone():
            table, warnings = self._attempt(sql, params, Statement.table)
            return Result(_plain_integers(table), warnings)

    @contextlib.contextmanager
    def stream(self, sql: str, params: Params = (), form: Form | None = None) -> Iterator["Stream"]:
        """Runs one read-only statement. The rows come in batches, so that the answer need not fit into memory.

        With a `form`, DuckDB writes each row as text if it can: see `Stream.texts`. Other queries of this store wait
        until it ends. Raises like `query`, also while the batches are read.
        """
        with self._alone():
            statement, warnings = self._attempt(sql, params, lambda statement: statement, form)
            try:
                yield Stream(statement, warnings)
            except duckdb.Error as error:
                raise QueryError(f"{error}\n  hint: a file was removed or is damaged; ask again") from error

    def ingest(self) -> "Ingested":
        """Loads rows that are not in the database yet, and waits if another process is ingesting. The snapshot stays
        unchanged."""
        from storage.ingest import ingest

        return ingest(self.root)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Makes sure that only one statement runs at a time. It ends with the block."""
        with self._turn:
            try:
                yield
            finally:
                if self._statement:
                    self._statement.close()
                    if self._statement.stuck:
                        self._drop_snapshot()

    def _attempt(
        self, sql: str, params: Params, use: Callable[[Statement], _Answer], form: Form | None = None
    ) -> tuple[_Answer, tuple[str, ...]]:
        """Returns the result of `use` for the running statement, and the snapshot's warnings."""
        damaged: dict[str, str] = {}
        blames_index = False
        for attempt in range(_ATTEMPTS):
            snapshot = self._snapshot or self._take_snapshot(sql, damaged, index=not blames_index)
            self._statement = Statement(snapshot, self.limits)
            try:
                self._statement.start(sql, params, form)
                answer = use(self._statement)
            except duckdb.Error as error:
                cause = error
                # A file was deleted or merged meanwhile, and the directories have the present state; or it is damaged.
                found: dict[str, str] = {}
                with contextlib.suppress(duckdb.Error):  # a damaged index
                    found = find_damage(snapshot, sql, error)
                damaged |= found
                # If repeated attempts find no faulty file, the index is faulty: all its data can be read without it.
                blames_index |= attempt > 0 and not found
                self._drop_snapshot()
            else:
                self._answered = True
                moved = (_MOVED,) if self._moved else ()
                return answer, (*snapshot.warnings, *moved)
        raise QueryError(f"{cause}\n  hint: `rpg db check` reports the damage") from cause

    def _take_snapshot(self, sql: str, damaged: Mapping[str, str], *, index: bool = True) -> Snapshot:
        try:
            snapshot = Snapshot(self.root, damaged=damaged, index=index, sql=sql)
        except duckdb.Error:
            if not index:
                raise
            return self._take_snapshot(sql, damaged, index=False)
        if index and snapshot.num_unknown > _MOST_UNKNOWN:
            from storage.ingest import ingest

            with contextlib.suppress(Timeout, OSError, duckdb.Error):  # another ingests, or the home is read-only
                snapshot.close()
                ingest(self.root, wait_seconds=0)
            snapshot = Snapshot(self.root, damaged=damaged, sql=sql)
        self._remove_scratch = confine(snapshot.connection, self.root, self.limits)
        self._moved |= self._answered
        self._snapshot = snapshot
        return snapshot

    def _drop_snapshot(self) -> None:
        if self._snapshot:
            if not (self._statement and self._statement.stuck):  # closing would wait for it
                self._snapshot.close()
                self._remove_scratch()
            self._snapshot = self._statement = None


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise ImportError(f"this needs {package}: `pip install {package}`; `.arrow()` and `.rows` need no package")


def _plain_integers(table: "pa.Table") -> "pa.Table":
    """Converts the 38-digit decimals of DuckDB's integer sums to 64-bit integers, if they fit."""
    import pyarrow as pa

    for index, field in enumerate(table.schema):
        if pa.types.is_decimal(field.type) and field.type.precision == 38 and field.type.scale == 0:
            try:
                table = table.set_column(index, field.name, table.column(index).cast(pa.int64()))
            except (pa.ArrowInvalid, decimal.DecimalException):
                continue
    return table
