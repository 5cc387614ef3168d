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
class LoadedSegment:
    """A segment, and what the database noted when it was loaded."""

    segment_id: int
    segment: Segment
    num_rows: int
    current_columns: bool
    problem: str | None


@dataclass(frozen=True)
class SegmentChanges:
    """How the segments on disk differ from those that the database has loaded."""

    unchanged: list[LoadedSegment]
    """Loaded, and on disk as they were."""
    new: list[Segment]
    """On disk, and not loaded yet."""
    gone: list[int]
    """Ids of segments that were loaded and are no longer on disk as they were."""


def loaded_segments(connection: duckdb.DuckDBPyConnection, schema: str) -> list[LoadedSegment]:
    """Every segment that a database has loaded."""
    rows = connection.execute(
        "SELECT segment_id, key, table_name, run_id, num_bytes, modified_ns, num_rows, current_columns, problem"
        f" FROM {schema}.segments"
    ).fetchall()
    return [LoadedSegment(row[0], Segment(*row[1:6]), *row[6:]) for row in rows]


def find_changes(on_disk: list[Segment], loaded: list[LoadedSegment]) -> SegmentChanges:
    """Which segments are unchanged, new or gone. A file that changed counts as gone and as new."""
    present = {segment.identity for segment in on_disk}
    before = {entry.segment.identity for entry in loaded}
    return SegmentChanges(
        unchanged=[entry for entry in loaded if entry.segment.identity in present],
        new=[segment for segment in on_disk if segment.identity not in before],
        gone=[entry.segment_id for entry in loaded if entry.segment.identity not in present],
    )


def open_snapshot(
    root: Path, *, sandboxed: bool = True, thorough: bool = False
) -> tuple[duckdb.DuckDBPyConnection, tuple[str, ...]]:
    """A connection that has every table and view, and a line for each segment that they leave out.

    Args:
        sandboxed: the connection reads nothing of this machine but what is recorded: for SQL that a user wrote.
        thorough: every segment is read whole first, and left out if that fails; else only new footers are read.
    """
    connection = database.connect()
    warnings: list[str] = []
    obstacle = database.attach(connection, root)
    if obstacle and obstacle != "missing":
        warnings.append(f"experiments.duckdb is {obstacle}; reading the segments (`rpg db rebuild` makes it again)")
    loaded = [] if obstacle else loaded_segments(connection, "store.recorded")
    # The order matters. States are read before segments, so that the evaluation that a state names is on disk.
    # Segments are listed before attempts are read, so that every row's attempt is known: it may replace earlier rows.
    catalogue = read_catalogue(root)
    changes = find_changes(scan(root), loaded)
    catalogue["attempts"] = read_attempts(root)
    connection.execute(database.sql("catalogue.sql"))
    for table, rows in catalogue.items():
        database.insert_rows(connection, table, rows)
    warnings += _create_recorded(connection, root, changes, attached=not obstacle, thorough=thorough)
    connection.execute(database.sql("queries/views.sql"))
    if sandboxed:
        connection.execute(f"SET allowed_directories = [{database.quoted(root)}]")
        connection.execute("SET enable_external_access = false; SET lock_configuration = true")
    for warning in warnings:
        _log.warning(warning)
    return connection, tuple(warnings)


def _create_recorded(
    connection: duckdb.DuckDBPyConnection, root: Path, changes: SegmentChanges, *, attached: bool, thorough: bool
) -> list[str]:
    """Makes the views `recorded.<table>` over database and segments. Returns a line for each segment left out."""
    connection.execute("CREATE SCHEMA recorded; CREATE TABLE recorded.gone (segment_id BIGINT)")
    database.insert_rows(connection, "recorded.gone", [{"segment_id": number} for number in changes.gone])
    current, other, skipped = _segments_to_read(root, changes, thorough=thorough)
    for table in (*NATIVE, *PARQUET):
        relation = _in_parquet(table, root, current[table], other[table])
        if table in NATIVE and attached:
            relation = f"{_stored(table, changes.gone)} UNION ALL BY NAME {relation}"
        connection.execute(f"CREATE VIEW recorded.{table} AS {relation}")
    return skipped


def _segments_to_read(root: Path, changes: SegmentChanges, *, thorough: bool) -> tuple[_ByTable, _ByTable, list[str]]:
    """Of each table the segments with today's columns and those with other ones; and a line for each one left out."""
    current, other = _ByTable(list), _ByTable(list)
    skipped = [f"skipped {entry.segment.key}: {entry.problem}" for entry in changes.unchanged if entry.problem]
    outside = [entry for entry in changes.unchanged if entry.segment.table in PARQUET and not entry.problem]
    unread = [*(entry.segment for entry in outside), *changes.new] if thorough else changes.new
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
            continue  # deleted since the scan
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
