"""The store as its readers see it: one method, SQL in, rows out."""

import decimal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import pyarrow as pa

from storage.errors import QueryError
from storage.explain import explain, is_about_files
from storage.ingest import Ingested, ingest
from storage.snapshot import open_snapshot

_READING = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN, duckdb.StatementType.CALL}


@dataclass(frozen=True)
class Result:
    """What a query answered."""

    table: pa.Table
    warnings: tuple[str, ...] = ()
    """Segments that were left out because they are damaged, one line each."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names, in order; two may be equal."""
        return tuple(self.table.column_names)

    @cached_property
    def rows(self) -> list[tuple[Any, ...]]:
        """Plain Python values; times are aware and UTC."""
        if not self.table.num_columns:
            return []
        return list(zip(*(column.to_pylist() for column in self.table.columns), strict=True))

    def arrow(self) -> pa.Table:
        """The same as an Arrow table."""
        return self.table


class Store:
    """Everything recorded under one home directory, ingested or not. Reading takes no lock and waits for nobody."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()

    @classmethod
    def open(cls, home_root: Path) -> "Store":
        """A home that holds nothing yet has all tables, empty."""
        return cls(home_root)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held between queries."""

    def query(self, sql: str, params: Sequence[object] | Mapping[str, object] = ()) -> Result:
        """Runs one statement that reads, over everything recorded at this moment.

        Raises:
            QueryError: the statement is wrong, does not read, or touches what is not recorded here.
        """
        for _ in range(2):  # twice: a file may go away between the look at the directories and the reading
            try:
                return self._run(sql, params)
            except duckdb.Error:
                continue
        try:
            return self._run(sql, params, thorough=True)
        except duckdb.Error as error:
            raise QueryError(f"{error}\n  hint: `rpg db check` says what is damaged") from error

    def ingest(self) -> Ingested:
        """Loads what is not in the database yet; waits for another ingester."""
        return ingest(self.root)

    def _run(self, sql: str, params: Sequence[object] | Mapping[str, object], *, thorough: bool = False) -> Result:
        """Raises QueryError for what the statement gets wrong, duckdb.Error where a file may be at fault."""
        connection, warnings = open_snapshot(self.root, thorough=thorough)
        try:
            _require_reading(connection, sql)
            relation = connection.sql(sql, params=params or None)
            table = relation.to_arrow_table() if relation is not None else pa.table({})
        except duckdb.Error as error:
            if is_about_files(error):
                raise
            raise QueryError(explain(connection, error)) from error
        finally:
            connection.close()
        return Result(_plain_integers(table), warnings)


def _require_reading(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """One statement that reads. (PIVOT is a SELECT that first creates a type.)"""
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
    """Sums of integers come as 38-digit decimals; where they fit they are integers again."""
    for index, field in enumerate(table.schema):
        if pa.types.is_decimal(field.type) and field.type.precision == 38 and field.type.scale == 0:
            try:
                table = table.set_column(index, field.name, table.column(index).cast(pa.int64()))
            except (pa.ArrowInvalid, decimal.DecimalException):
                continue
    return table
