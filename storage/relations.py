"""Definitions of a connection's views: a SELECT over segments for each recorded table, and the views based on these."""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import duckdb

from storage import database
from storage.columns import NATIVE, PARQUET, column_list, columns
from storage.documentation import metric_names
from storage.segments import Segment

_STATEMENT = re.compile(r"^CREATE VIEW ([\w.]+) AS\s(.*?);$", re.DOTALL | re.MULTILINE)
_NOT_SUPERSEDED = (
    "NOT EXISTS (FROM recorded.superseded AS s"
    " WHERE s.run_id = r.run_id AND s.attempt = r.attempt AND r.step > s.valid_through)"
)
SUMMARY = "rewards"
"""The table in which an ingest keeps a summary of the runs' metrics."""


@dataclass(frozen=True)
class View:
    """A view for queries, or one on which such a view is based."""

    select: str
    over: tuple[str, ...]
    """The views that must be created before this view, in that order."""
    tables: frozenset[str]
    """The tables that this view reads, directly or through other views; they are recorded in segments or made from
    them.
    """


@cache
def views() -> dict[str, View]:
    """Returns the views by name, in the order in which they can be created: those of views.sql, and that of the
    metrics' names."""
    made: dict[str, View] = {}
    for name, select in _STATEMENT.findall(database.sql("queries/views.sql")):
        words = re.findall(r"[\w.]+", select)
        direct = [other for other in made if other in words]
        over = dict.fromkeys(inner for other in direct for inner in (*made[other].over, other))
        tables = {table for table in (*NATIVE, *PARQUET, SUMMARY) if f"recorded.{table}" in words}
        made[name] = View(select, tuple(over), frozenset(tables.union(*(made[other].tables for other in direct))))
    return made | {"metric_names": View(metric_names(), (), frozenset())}


@dataclass(frozen=True)
class Pack:
    """A file with the rows of many runs, and the runs that still count."""

    key: str
    """Path relative to the home directory."""
    num_bytes: int
    without: tuple[str, ...]
    """Runs whose rows no longer count: they were deleted, or have changed."""
    has_resumed: bool
    """Whether rows of some runs may be superseded."""


def known_packs(connection: duckdb.DuckDBPyConnection, schema: str, table: str, unit_holds: str) -> list[Pack]:
    """Returns a table's packs in an index. Packs without a row that counts are left out.

    Args:
        unit_holds: SQL that is true for a row whose unit matches the index; the row has a `run_id`.
    """
    rows = connection.execute(
        f"WITH listed AS (SELECT *, {unit_holds}"
        f" AND (pack, run_id) IN (SELECT (pack, run_id) FROM {schema}.segments) AS counts FROM {schema}.packed)"
        " SELECT pack, any_value(num_bytes), list(run_id ORDER BY run_id) FILTER (NOT counts),"
        " bool_or(counts AND run_id IN (SELECT run_id FROM recorded.superseded))"
        f" FROM listed WHERE table_name = '{table}' GROUP BY pack HAVING bool_or(counts) ORDER BY pack"
    ).fetchall()
    return [Pack(key, size, tuple(without or ()), has_resumed) for key, size, without, has_resumed in rows]


def in_segments(
    table: str,
    root: Path,
    current: Collection[Segment],
    other: Collection[Segment],
    resumed: Collection[str] = (),
    packs: Iterable[Pack] = (),
) -> str:
    """Returns a table's rows in segments, as a SELECT.

    Args:
        current: segments with exactly the present columns: one file's footer is enough to bind the query.
        other: segments of older or newer versions; missing columns are NULL, unknown ones left out.
        resumed: runs of which some rows may be superseded; superseded rows are left out.
        packs: files with the rows of other segments.
    """
    parts = [*_read_packs(root, packs)]
    for segments, options in ((current, ""), (other, ", union_by_name = true")):
        whole = [segment for segment in segments if segment.run_id not in resumed]
        partly = [segment for segment in segments if segment.run_id in resumed]
        if whole:
            parts.append(f"SELECT * FROM {_read(root, whole, options)}")
        if partly:
            parts.append(f"SELECT * FROM {_read(root, partly, options)} AS r WHERE {_NOT_SUPERSEDED}")
    # If columns may be missing, a relation without rows sets their order and types.
    if other or not parts:
        nulls = ", ".join(f"NULL::{kind} AS {name}" for name, kind in columns(table))
        parts.insert(0, f"SELECT {nulls} WHERE false")
    return f"SELECT {column_list(table)} FROM ({' UNION ALL BY NAME '.join(parts)})"


def _read_packs(root: Path, packs: Iterable[Pack]) -> Iterator[str]:
    """Yields a SELECT for each set of packs whose counting rows are selected in the same way."""
    paths_where: dict[str, list[str]] = {}
    for pack in packs:
        conditions = [f"run_id NOT IN ({', '.join(map(database.quoted, pack.without))})"] if pack.without else []
        conditions += [_NOT_SUPERSEDED] if pack.has_resumed else []
        path = database.file_literal(root / pack.key)
        paths_where.setdefault(" AND ".join(conditions) or "true", []).append(path)
    for condition, paths in paths_where.items():
        yield f"SELECT * FROM read_parquet([{', '.join(paths)}], hive_partitioning = false) AS r WHERE {condition}"


def rewards(metrics: str) -> str:
    """Returns a SELECT of the summary's rows, given a SELECT of rows of `metrics`."""
    return f"WITH metrics AS ({metrics}) {database.sql('queries/rewards.sql')}"


def _read(root: Path, segments: Iterable[Segment], options: str) -> str:
    """Returns a relation with the rows of the files.

    The run comes from the file's path, so that DuckDB opens only the files of the runs in a query.
    """
    paths = ", ".join(database.file_literal(root / segment.key) for segment in segments)
    below_runs = f"substring(filename, {len(f'{root}/runs/') + 1})"
    # Not split_part, which DuckDB computes for each row; this is computed once for each vector of rows.
    run_id = f"left({below_runs}, strpos({below_runs}, '/') - 1)"
    source = f"read_parquet([{paths}], filename = true, hive_partitioning = false{options})"
    return f"(SELECT * EXCLUDE (filename) REPLACE ({run_id} AS run_id) FROM {source})"
