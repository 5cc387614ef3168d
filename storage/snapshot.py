"""One consistent look at everything recorded: the database as published, and from the segments what it lacks."""

import logging
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import duckdb

from storage import database
from storage.catalogue import read_attempts, read_catalogue
from storage.columns import NATIVE, PARQUET, column_list, columns
from storage.segments import BadSegmentError, Segment, inspect, read, scan

_log = logging.getLogger("storage")
_ByTable = defaultdict[str, list[Segment]]


@dataclass(frozen=True)
class Loaded:
    """What the database knows of a segment."""

    segment_id: int
    segment: Segment
    num_rows: int
    current_columns: bool
    problem: str | None


@dataclass(frozen=True)
class Sorted:
    """The segments on disk, held against the database."""

    loaded: list[Loaded]
    """Known, and unchanged on disk."""
    fresh: list[Segment]
    """Not known yet."""
    gone: list[int]
    """Ids of those that are known and no longer on disk as they were."""


def loaded_segments(connection: duckdb.DuckDBPyConnection, schema: str) -> list[Loaded]:
    """Every segment that a database holds."""
    rows = connection.execute(
        "SELECT segment_id, key, table_name, run_id, num_bytes, modified_ns, num_rows, current_columns, problem"
        f" FROM {schema}.segments"
    ).fetchall()
    return [Loaded(row[0], Segment(*row[1:6]), *row[6:]) for row in rows]


def sort_segments(on_disk: list[Segment], known: list[Loaded]) -> Sorted:
    """Which segments are known, new or gone. A file that changed is both new and gone."""
    present = {segment.identity: segment for segment in on_disk}
    loaded = [entry for entry in known if entry.segment.identity in present]
    held = {entry.segment.identity for entry in loaded}
    return Sorted(
        loaded=loaded,
        fresh=[segment for segment in on_disk if segment.identity not in held],
        gone=[entry.segment_id for entry in known if entry.segment.identity not in present],
    )


def open_snapshot(
    root: Path, *, sandboxed: bool = True, thorough: bool = False
) -> tuple[duckdb.DuckDBPyConnection, tuple[str, ...]]:
    """A connection with every table and view, and what was left out of them, and why.

    Args:
        sandboxed: SQL that a user wrote reads what is recorded and nothing else of the machine.
        thorough: read every segment whole first, and leave out those that cannot be; else their footers are trusted.
    """
    connection = database.connect()
    warnings: list[str] = []
    trouble = database.attach(connection, root)
    if trouble and trouble != "missing":
        warnings.append(f"experiments.duckdb is {trouble}; reading the segments (`rpg db rebuild` makes it again)")
    known = [] if trouble else loaded_segments(connection, "store.recorded")
    # The order matters. State before segments: the evaluation that it names is on disk.
    # Segments before attempts: no row is seen without the attempt that wrote it, so none beside the row it replaces.
    catalogue = read_catalogue(root)
    found = sort_segments(scan(root), known)
    catalogue["attempts"] = read_attempts(root)
    connection.execute(database.sql("catalogue.sql"))
    for table, rows in catalogue.items():
        database.insert_rows(connection, table, rows)
    warnings += _create_recorded(connection, root, found, attached=not trouble, thorough=thorough)
    connection.execute(database.sql("queries/views.sql"))
    if sandboxed:
        connection.execute(f"SET allowed_directories = [{database.quoted(root)}]")
        connection.execute("SET enable_external_access = false; SET lock_configuration = true")
    for warning in warnings:
        _log.warning(warning)
    return connection, tuple(warnings)


def _create_recorded(
    connection: duckdb.DuckDBPyConnection, root: Path, found: Sorted, *, attached: bool, thorough: bool
) -> list[str]:
    """The views `recorded.<table>` over database and segments. Returns the segments left out."""
    connection.execute("CREATE SCHEMA recorded; CREATE TABLE recorded.gone (segment_id BIGINT)")
    database.insert_rows(connection, "recorded.gone", [{"segment_id": number} for number in found.gone])
    current, other, skipped = _segments_to_read(root, found, thorough=thorough)
    for table in (*NATIVE, *PARQUET):
        relation = _in_parquet(table, root, current[table], other[table])
        if table in NATIVE and attached:
            relation = f"{_stored(table, found.gone)} UNION ALL BY NAME {relation}"
        connection.execute(f"CREATE VIEW recorded.{table} AS {relation}")
    return skipped


def _segments_to_read(root: Path, found: Sorted, *, thorough: bool) -> tuple[_ByTable, _ByTable, list[str]]:
    """Of each table the segments with today's columns, those with others; and a line for each that is left out."""
    current, other = _ByTable(list), _ByTable(list)
    skipped = [f"skipped {entry.segment.key}: {entry.problem}" for entry in found.loaded if entry.problem]
    outside = [entry for entry in found.loaded if entry.segment.table in PARQUET and not entry.problem]
    unread = [*(entry.segment for entry in outside), *found.fresh] if thorough else found.fresh
    for entry in [] if thorough else outside:
        (current if entry.current_columns else other)[entry.segment.table].append(entry.segment)
    for segment in unread:
        try:
            if thorough:
                read(root, segment)
            _, is_current = inspect(root, segment)
        except BadSegmentError as error:
            skipped.append(f"skipped {segment.key}: {error}")
        except FileNotFoundError:
            continue  # taken away since the scan
        else:
            (current if is_current else other)[segment.table].append(segment)
    return current, other, skipped


def _in_parquet(table: str, root: Path, current: list[Segment], other: list[Segment]) -> str:
    """A table's rows that lie in segments, as a SELECT.

    Args:
        current: segments with exactly today's columns: one file's footer is enough to bind the query.
        other: segments of older or newer versions; missing columns are NULL, unknown ones left out.
    """
    # The first relation has no rows: it gives the columns that older files lack their place and type.
    parts = ["SELECT " + ", ".join(f"NULL::{sql} AS {name}" for name, _, sql in columns(table)) + " WHERE false"]
    if current:
        parts.append(f"SELECT {column_list(table)} FROM read_parquet([{_paths(root, current)}])")
    if other:
        parts.append(f"SELECT * FROM read_parquet([{_paths(root, other)}], union_by_name = true)")
    return f"SELECT {column_list(table)} FROM ({' UNION ALL BY NAME '.join(parts)})"


def _paths(root: Path, segments: list[Segment]) -> str:
    return ", ".join(database.quoted(root / segment.key) for segment in segments)


def _stored(table: str, gone: list[int]) -> str:
    select = f"SELECT {column_list(table)} FROM store.recorded.{table}"
    return f"{select} WHERE segment_id NOT IN (FROM recorded.gone)" if gone else select
