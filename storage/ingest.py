"""The ingester, of which one works at a time: it loads whole segments into the database, each exactly once."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
from filelock import FileLock

from storage import database
from storage.catalogue import Rows, read_attempts, read_catalogue
from storage.columns import NATIVE, column_list
from storage.segments import BadSegmentError, Segment, inspect, read, scan
from storage.snapshot import LoadedSegment, SegmentChanges, find_changes, loaded_segments

SEGMENTS_AT_ONCE = 512
"""Files read into memory together."""


@dataclass(frozen=True)
class Ingested:
    """What an ingest did."""

    segments: int = 0
    """Segments loaded."""
    rows: int = 0
    """Rows copied into the database; those of the large tables stay in their segments."""
    removed: int = 0
    """Segments dropped because their files are gone or changed."""
    skipped: tuple[str, ...] = ()
    """A line for each new file that is damaged or of another run."""


def ingest(home_root: Path, *, wait_seconds: float = -1) -> Ingested:
    """Brings the database up to what is on disk.

    One ingester works at a time, under a file lock held from before the database is opened until the new
    one is published; readers take no part in the lock. Killed at any moment, it has published all or nothing.

    Args:
        wait_seconds: how long to wait for another ingester; -1: as long as it takes.
    Raises:
        filelock.Timeout: another ingester was at work all that time.
    """
    root = Path(home_root).absolute()
    with _lock(root, wait_seconds):
        return _ingest(root, from_scratch=False)


def rebuild(home_root: Path) -> Ingested:
    """Makes the database again from the run directories. The old one serves readers until the new one is whole."""
    root = Path(home_root).absolute()
    with _lock(root, -1):
        return _ingest(root, from_scratch=True)


def _lock(root: Path, wait_seconds: float) -> FileLock:
    path = root / "locks" / "ingest.lock"
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    path.parent.mkdir(exist_ok=True)
    return FileLock(path, timeout=wait_seconds)


def _ingest(root: Path, *, from_scratch: bool) -> Ingested:
    loaded, digest = ([], "") if from_scratch else _present_database(root)
    catalogue = read_catalogue(root)
    changes = find_changes(scan(root), loaded)
    catalogue["attempts"] = read_attempts(root)
    new_digest = hashlib.sha256(json.dumps(catalogue, sort_keys=True, default=str).encode()).hexdigest()
    if digest == new_digest and not changes.new and not changes.gone:
        return Ingested()
    connection = database.open_copy(root) if digest else database.create(root)
    try:
        connection.execute("BEGIN")
        _remove(connection, changes.gone)
        result = _load(connection, root, changes)
        _replace_catalogue(connection, catalogue, new_digest)
        connection.execute("COMMIT")
        connection.execute("CHECKPOINT")
    finally:
        connection.close()
    database.publish(root)
    return result


def _present_database(root: Path) -> tuple[list[LoadedSegment], str]:
    """The segments loaded before and the digest of the catalogue; ([], "") where the database cannot be used."""
    connection = database.connect()
    try:
        if database.attach(connection, root):
            return [], ""
        digest = connection.execute("SELECT digest FROM store.recorded.catalogue").fetchone()
        return loaded_segments(connection, "store.recorded"), digest[0] if digest else ""
    finally:
        connection.close()


def _remove(connection: duckdb.DuckDBPyConnection, gone: Sequence[int]) -> None:
    if not gone:
        return
    for table in (*NATIVE, "segments"):
        connection.execute(f"DELETE FROM recorded.{table} WHERE segment_id IN (SELECT unnest(?))", [list(gone)])


def _load(connection: duckdb.DuckDBPyConnection, root: Path, changes: SegmentChanges) -> Ingested:
    (next_id,) = connection.execute("SELECT coalesce(max(segment_id), 0) + 1 FROM recorded.segments").fetchone() or (1,)
    num_rows, skipped = 0, []
    for batch in _batches(changes.new):
        entries: list[LoadedSegment] = []
        tables: dict[str, list[pa.Table]] = {name: [] for name in NATIVE}
        for segment in batch:
            entry = _open(root, segment, next_id, tables)
            if entry is None:
                continue
            entries.append(entry)
            next_id += 1
            if entry.problem:
                skipped.append(f"{segment.key}: {entry.problem}")
        num_rows += sum(_insert(connection, name, parts) for name, parts in tables.items())
        _insert_segments(connection, entries)
    return Ingested(len(changes.new) - len(skipped), num_rows, len(changes.gone), tuple(skipped))


def _open(root: Path, segment: Segment, segment_id: int, tables: dict[str, list[pa.Table]]) -> LoadedSegment | None:
    """Reads a segment, and adds the rows that are copied to `tables`. None if the file was deleted meanwhile."""
    try:
        num_rows, current = inspect(root, segment)
        if segment.table in NATIVE:
            rows = read(root, segment)
            ids = pa.array([segment_id] * len(rows), pa.int64())
            tables[segment.table].append(rows.append_column("segment_id", ids))
        return LoadedSegment(segment_id, segment, num_rows, current, None)
    except BadSegmentError as error:
        return LoadedSegment(segment_id, segment, 0, False, str(error))
    except FileNotFoundError:
        return None


def _insert(connection: duckdb.DuckDBPyConnection, table: str, parts: list[pa.Table]) -> int:
    if not parts:
        return 0
    rows = pa.concat_tables(parts)
    connection.register("incoming", rows)
    names = f"segment_id, {column_list(table)}"
    connection.execute(f"INSERT INTO recorded.{table} ({names}) SELECT {names} FROM incoming")
    connection.unregister("incoming")
    return len(rows)


def _insert_segments(connection: duckdb.DuckDBPyConnection, entries: list[LoadedSegment]) -> None:
    rows = [
        {
            "segment_id": entry.segment_id,
            "key": entry.segment.key,
            "table_name": entry.segment.table,
            "run_id": entry.segment.run_id,
            "num_bytes": entry.segment.num_bytes,
            "modified_ns": entry.segment.modified_ns,
            "num_rows": entry.num_rows,
            "current_columns": entry.current_columns,
            "problem": entry.problem,
        }
        for entry in entries
    ]
    database.insert_rows(connection, "recorded.segments", rows)


def _replace_catalogue(connection: duckdb.DuckDBPyConnection, catalogue: Rows, digest: str) -> None:
    """Replaces all catalogue rows: they are few, and rows of deleted documents must go."""
    for table, rows in catalogue.items():
        connection.execute(f"DELETE FROM {table}")
        database.insert_rows(connection, table, rows)
    connection.execute("DELETE FROM recorded.catalogue")
    connection.execute("INSERT INTO recorded.catalogue VALUES (?)", [digest])


def _batches(segments: list[Segment]) -> Iterator[list[Segment]]:
    for start in range(0, len(segments), SEGMENTS_AT_ONCE):
        yield segments[start : start + SEGMENTS_AT_ONCE]
