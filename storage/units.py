"""Units: the directories with documents in a home, which are runs, experiments, studies and artifacts.

Documents are replaced by renaming, so that a unit's directory changes its modification time whenever one of its
documents changes. A reader compares that time with the one in the index and reads only units that differ: checking
5,000 unchanged runs costs one listing of `runs/`.
"""

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from specs.documents.names import is_readable_name
from specs.documents.reading import read_document
from specs.machine.liveness import FINAL, is_dead
from specs.records import EVALUATED, TABLES
from storage.catalogue import Documents, Rows, read_unit
from storage.database import quoted_list
from storage.segments import BadSegmentError, Segment, entries, run_segments

_SETTLED_NS = 2_000_000_000
"""Time in ns after a directory's change during which another change may leave its modification time unchanged."""
UNIT_OF_RUN = "'runs/' || run_id"
"""SQL: the unit of a row's run."""
GONE = "the file is gone"
"""The problem of a segment that was in the index and is gone without a replacement."""
_PARTS = ("attempts", "leases", "evaluate", "segments", *(f"segments/{table}" for table in TABLES))
"""Directories of a run that may change although the modification time of the run's own directory does not."""
_PLACES = {part: place for place, part in enumerate(_PARTS)}
_PLACES_OF = {
    table: {_PLACES["segments"], _PLACES[f"segments/{table}"], *([_PLACES["evaluate"]] if table in EVALUATED else [])}
    for table in TABLES
}
"""Table -> indices into `_PARTS` of the directories in which its files appear and disappear."""
_HAS_ENDED = " ended"
"""Suffix of the stamp of a run that has ended. Only a new attempt, or a manual edit, changes such a stamp."""


@dataclass(frozen=True)
class KnownSegment:
    """A segment, and the data of its footer."""

    segment: Segment
    num_rows: int
    current_columns: bool
    problem: str | None
    """The reason why it is skipped; None if it is good."""
    pack: str | None = None
    """Path, relative to the home, of the pack that also has the segment's rows; None if the index knows no such
    pack."""


@dataclass(frozen=True)
class Unit:
    """Content of a unit's directory."""

    path: str
    """Path relative to the home directory, such as `runs/ID` or `artifacts/STAGE/FINGERPRINT`."""
    stamp: str | None
    """Stamp of the directory before it was read; None if the directory must be read again in any case."""
    rows: Rows
    """Rows of the catalogue's tables."""
    segments: tuple[KnownSegment, ...]
    has_merged: bool
    """Whether segments that were merged into others still exist, and are to be deleted."""
    problems: tuple[str, ...]
    """A line for each skipped part of the unit's documents."""


def unit_stamps(
    root: Path, before: Mapping[str, str | None], tables: Collection[str] = tuple(TABLES)
) -> dict[str, str]:
    """Returns the stamp of every unit's directory, by its path relative to the home. A stamp changes whenever the
    unit's content does.

    It is the directory's modification time; for a run also those of its directories with leases, attempts, results and
    rows: a worker that resumes the run writes there, and a file may be deleted or restored there by hand.

    Args:
        before: the stamps in the index, by which unchanged directories are skipped.
        tables: tables whose files are checked also in runs that have ended.
    """
    watched = sorted({_PLACES["attempts"]}.union(*(_PLACES_OF[table] for table in tables)))
    stamps = {path: str(time) for kind in ("experiments", "studies") for path, time in _directories(root, kind)}
    for path, changed in _directories(root, "runs"):
        stamps[path] = _run_stamp(f"{root}/{path}", str(changed), before.get(path) or "", watched)
    for stage, _ in _directories(root, "artifacts"):
        stamps |= {path: str(changed) for path, changed in _directories(root, stage)}
    return stamps


def _run_stamp(directory: str, changed: str, before: str, watched: Iterable[int]) -> str:
    """Returns the stamp of a run. `watched`: indices into `_PARTS` of the directories that are checked if the run has
    ended."""
    time, *known = before.removesuffix(_HAS_ENDED).split() or [""]
    if time == changed and len(known) == len(_PARTS):
        places = watched if before.endswith(_HAS_ENDED) else range(len(_PARTS))
        # A missing directory is still missing if the directory above it is unchanged.
        if all(known[place] in ("0", _time_of(f"{directory}/{_PARTS[place]}")) for place in places):
            return before
    return " ".join([changed, *(_time_of(f"{directory}/{part}") for part in _PARTS)])


def read_units(root: Path, stamps: dict[str, str], known: dict[str, KnownSegment]) -> list[Unit]:
    """Reads units.

    Args:
        stamps: the units to read, and their stamps.
        known: key -> segment that was read before; its footer is not read again.
    """
    known_of: dict[str, dict[str, KnownSegment]] = {}
    for key, entry in known.items():
        known_of.setdefault(f"runs/{entry.segment.run_id}", {})[key] = entry
    return [_read_unit(root, path, stamp, known_of.get(path, {})) for path, stamp in stamps.items()]


def _read_unit(root: Path, path: str, stamp: str, known: dict[str, KnownSegment]) -> Unit:
    # The order matters. States are read before segments, so that the evaluation in a state is on disk.
    # Segments are listed before attempts are read, so that every row's attempt is known: an attempt may replace earlier
    # rows.
    segments: list[KnownSegment] = []
    merged: set[str] = set()

    def read_segments(run_id: str) -> None:
        from storage.contents import half_written, lost, merged_away

        listed = run_segments(root, run_id)
        merged.update(merged_away(root, listed))
        left_out = merged | half_written(root, listed)
        live = (segment for segment in listed if segment.key not in left_out)
        segments.extend(entry for s in live if (entry := _inspected(root, s, known.get(s.key))))
        before = [entry.segment for entry in known.values()]
        segments.extend(KnownSegment(segment, 0, False, GONE) for segment in lost(root, run_id, before, listed))

    documents, stamp = Documents(root), stamp.removesuffix(_HAS_ENDED)
    rows = read_unit(root, path, documents, read_segments)
    # A damaged file may be restored in place, which changes no directory's time.
    is_whole = not documents.problems and not any(entry.problem for entry in segments)
    settled = stamp if is_whole and _is_settled(stamp) and _is_closed(root, path, rows, segments) else None
    if settled and path.startswith("runs/") and rows["runs"][0]["status"] in FINAL:
        settled += _HAS_ENDED
    return Unit(path, settled, rows, tuple(segments), bool(merged), tuple(documents.problems))


def _inspected(root: Path, segment: Segment, before: KnownSegment | None) -> KnownSegment | None:
    """Returns the segment with its problem, if any; None if the file was deleted meanwhile."""
    from storage.contents import inspect

    # The footer need not show damage of a file's content. A repaired file has another time.
    if before is not None and (segment == before.segment if before.problem else segment.is_as(before.segment)):
        return before
    try:
        footer = inspect(root, segment)
    except BadSegmentError as error:
        return KnownSegment(segment, 0, False, str(error))
    except FileNotFoundError:
        return None
    return KnownSegment(segment, footer.num_rows, footer.current_columns, None)


def _is_settled(stamp: str) -> bool:
    """Returns whether a later change of the directory will have another modification time, whatever the clock's
    resolution."""
    return max(map(int, stamp.split())) < time.time_ns() - _SETTLED_NS


def _is_closed(root: Path, path: str, rows: Rows, segments: list[KnownSegment]) -> bool:
    """Returns whether the unit can change only together with its stamp.

    A crash of a run changes no file. A crashed run is resumed with a new lease.
    """
    if not path.startswith("runs/"):
        return True
    (run,) = rows["runs"]
    waits = run["status"] == "pending" and not segments and not rows["attempts"]
    is_dead_for_good = run["status"] == "crashed" and is_dead(root / path, read_document(root / path / "state.json"))
    return run["status"] in FINAL or waits or is_dead_for_good


def _directories(root: Path, parent: str) -> Iterator[tuple[str, int]]:
    """Yields the directories in a directory of the home, by name: path in the home, and modification time in ns.

    A directory with an invalid name for a unit is skipped: DuckDB would read a glob character in it as a pattern.
    """
    for entry in entries(root / parent):
        with suppress(OSError):
            if is_readable_name(entry.name) and entry.is_dir():
                yield f"{parent}/{entry.name}", entry.stat().st_mtime_ns


def _time_of(path: str) -> str:
    """Returns a directory's modification time, in ns; 0 if it is missing."""
    try:
        return str(os.stat(path).st_mtime_ns)
    except OSError:
        return "0"


def problems(entries: Iterable[KnownSegment]) -> list[str]:
    """Returns a line for each segment that is skipped."""
    return [f"{entry.segment.key}: {entry.problem}" for entry in entries if entry.problem]


def known_units(connection: duckdb.DuckDBPyConnection, schema: str) -> dict[str, tuple[str | None, list[str]]]:
    """Returns the units of an index: their stamps, and the skipped parts of their documents."""
    rows = connection.execute(f"SELECT unit, stamp, problems FROM {schema}.units").fetchall()
    return {unit: (stamp, problems or []) for unit, stamp, problems in rows}


def of_units(units: Iterable[str]) -> str:
    """Returns SQL that is true for rows of these units; the rows have a `run_id`."""
    return f"{UNIT_OF_RUN} IN (SELECT unnest({quoted_list(units)}))"


def known_segments(connection: duckdb.DuckDBPyConnection, schema: str, condition: str) -> dict[str, KnownSegment]:
    """Returns the segments of an index that meet a condition in SQL, by key."""
    rows = connection.execute(
        "SELECT key, table_name, run_id, num_bytes, modified_ns, num_rows, current_columns, problem, pack"
        f" FROM {schema}.segments WHERE {condition}"
    ).fetchall()
    return {row[0]: KnownSegment(Segment(*row[:5]), *row[5:]) for row in rows}


def as_row(entry: KnownSegment) -> dict[str, Any]:
    """Returns a row of the table `segments`."""
    segment = entry.segment
    return {
        "key": segment.key,
        "table_name": segment.table,
        "run_id": segment.run_id,
        "num_bytes": segment.num_bytes,
        "modified_ns": segment.modified_ns,
        "num_rows": entry.num_rows,
        "current_columns": entry.current_columns,
        "problem": entry.problem,
        "pack": entry.pack,
    }
