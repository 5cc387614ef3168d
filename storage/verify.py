"""What is wrong with the database, or with the files that it is made from. Reads everything; changes nothing."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import duckdb

from storage import database
from storage.catalogue import read_document
from storage.columns import NATIVE
from storage.liveness import STATUSES
from storage.segments import BadSegmentError, Segment, misnamed_files, read, run_directories, scan
from storage.snapshot import LoadedSegment, find_changes, loaded_segments


def check(home_root: Path) -> list[str]:
    """A line for each thing that is wrong, with the file's path in the home; [] if nothing is.

    Every segment is read whole. A segment that is not ingested yet is nothing wrong.
    """
    root = Path(home_root).absolute()
    segments = scan(root)
    return [*_documents(root), *_segments(root, segments), *_database(root, segments)]


def _documents(root: Path) -> Iterator[str]:
    for directory in run_directories(root):
        for name in ("run.json", "state.json"):
            if not read_document(directory / name):
                yield f"runs/{directory.name}/{name}: missing or not a JSON object"
        status = read_document(directory / "state.json").get("status", "pending")
        if status not in STATUSES:
            yield f"runs/{directory.name}/state.json: status `{status}` is none of {', '.join(STATUSES)}"
        for path in sorted((directory / "attempts").glob("*.json")):
            if not isinstance(read_document(path).get("resumed_from_step"), int):
                yield f"{path.relative_to(root)}: does not say which step it resumed from; what it replaced shows twice"


def _segments(root: Path, segments: list[Segment]) -> Iterator[str]:
    for key in misnamed_files(root):
        yield f"{key}: not named like a segment; it is not read"
    for segment in segments:
        try:
            rows = read(root, segment)
        except BadSegmentError as error:
            yield f"{segment.key}: {error}"
            continue
        except FileNotFoundError:
            continue
        for other in set(rows.column("run_id").unique().to_pylist()) - {segment.run_id}:
            yield f"{segment.key}: foreign: it has rows of run `{other}`"


def _database(root: Path, segments: list[Segment]) -> Iterator[str]:
    connection = database.connect()
    try:
        obstacle = database.attach(connection, root)
        if obstacle == "missing":
            return
        if obstacle:
            yield f"experiments.duckdb: {obstacle}; `rpg db rebuild` makes it again"
            return
        loaded = loaded_segments(connection, "store.recorded")
        gone = set(find_changes(segments, loaded).gone)
        for entry in loaded:
            if entry.segment_id in gone:
                yield f"{entry.segment.key}: is in experiments.duckdb, and the file is gone or another"
        yield from _row_counts(connection, loaded)
    except duckdb.Error as error:
        yield f"experiments.duckdb: damaged: {str(error).splitlines()[0]}; `rpg db rebuild` makes it again"
    finally:
        connection.close()


def _row_counts(connection: duckdb.DuckDBPyConnection, loaded: list[LoadedSegment]) -> Iterator[str]:
    """Checks that the database has as many rows of each loaded segment as the segment itself."""
    stored: Counter[int] = Counter()
    for table in NATIVE:
        rows = connection.execute(f"SELECT segment_id, count(*) FROM store.recorded.{table} GROUP BY 1").fetchall()
        stored.update(dict(rows))
    for entry in loaded:
        expected = entry.num_rows if entry.segment.table in NATIVE else 0
        if stored[entry.segment_id] != expected:
            yield f"{entry.segment.key}: has {expected} rows, experiments.duckdb {stored[entry.segment_id]}"
    for number in stored.keys() - {entry.segment_id for entry in loaded}:
        yield f"experiments.duckdb: has {stored[number]} rows of no known segment"
