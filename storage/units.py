"""Units, the directories with documents that a home consists of: runs, experiments, studies and artifacts.

Documents are replaced by renaming, so that a unit's directory changes its time whenever one of its documents does. A
reader compares that time with the one in the index and reads what differs: looking at 5,000 unchanged runs costs one
listing of `runs/`.
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
from specs.records import TABLES
from storage.catalogue import Documents, Rows, read_unit
from storage.columns import EVALUATED
from storage.database import quoted_list
from storage.segments import BadSegmentError, Segment, entries, run_segments

_SETTLED_NS = 2_000_000_000
"""A directory that changed less than so long ago may change again without its time showing it."""
UNIT_OF_RUN = "'runs/' || run_id"
"""SQL: the unit of the run that a row is of."""
GONE = "the file is gone"
"""The problem of a segment that the index had, and that nothing has replaced."""
_PARTS = ("attempts", "leases", "evaluate", "segments", *(f"segments/{table}" for table in TABLES))
"""Directories of a run in which something may change while the run's own time stays."""
_PLACES = {part: place for place, part in enumerate(_PARTS)}
_PLACES_OF = {
    table: {_PLACES["segments"], _PLACES[f"segments/{table}"], *([_PLACES["evaluate"]] if table in EVALUATED else [])}
    for table in TABLES
}
"""Table -> the places in `_PARTS` where its files come and go."""
_HAS_ENDED = " ended"
"""End of the stamp of a run that has ended: nothing in it changes but by a new attempt, or by hand."""


@dataclass(frozen=True)
class KnownSegment:
    """A segment, and what its footer says."""

    segment: Segment
    num_rows: int
    current_columns: bool
    problem: str | None
    """Why it is skipped; None: it is good."""
    pack: str | None = None
    """Path of the pack that has its rows too, relative to the home; None: the index knows none."""


@dataclass(frozen=True)
class Unit:
    """Content of a unit's directory."""

    path: str
    """Relative to the home directory: `runs/ID`, `artifacts/STAGE/FINGERPRINT`."""
    stamp: str | None
    """When the directory had changed before it was read; None: it is to be read again in any case."""
    rows: Rows
    """Rows of the catalogue's tables."""
    segments: tuple[KnownSegment, ...]
    has_merged: bool
    """Whether segments that were merged into others are still there, and are to be deleted."""
    problems: tuple[str, ...]
    """What of its documents was passed over: a line each."""


def unit_stamps(
    root: Path, before: Mapping[str, str | None], tables: Collection[str] = tuple(TABLES)
) -> dict[str, str]:
    """Returns every unit's directory, by its path relative to the home, and what changes whenever its content does.

    That is its time of change; of a run also those of the directories in it that have leases, attempts, results and
    rows: whoever takes the run up writes there, and a file may be deleted or restored there by hand.

    Args:
        before: the stamps that the index has, by which what cannot have changed need not be looked for.
        tables: those whose files are looked for in runs that have ended, too.
    """
    watched = sorted({_PLACES["attempts"]}.union(*(_PLACES_OF[table] for table in tables)))
    stamps = {path: str(time) for kind in ("experiments", "studies") for path, time in _directories(root, kind)}
    for path, changed in _directories(root, "runs"):
        stamps[path] = _run_stamp(f"{root}/{path}", str(changed), before.get(path) or "", watched)
    for stage, _ in _directories(root, "artifacts"):
        stamps |= {path: str(changed) for path, changed in _directories(root, stage)}
    return stamps


def _run_stamp(directory: str, changed: str, before: str, watched: Iterable[int]) -> str:
    """Returns the stamp of a run. `watched`: the places in `_PARTS` that are looked at where the run has ended."""
    time, *known = before.removesuffix(_HAS_ENDED).split() or [""]
    if time == changed and len(known) == len(_PARTS):
        places = watched if before.endswith(_HAS_ENDED) else range(len(_PARTS))
        # What was not there has not come while the directory above it is as it was.
        if all(known[place] in ("0", _time_of(f"{directory}/{_PARTS[place]}")) for place in places):
            return before
    return " ".join([changed, *(_time_of(f"{directory}/{part}") for part in _PARTS)])


def read_units(root: Path, stamps: dict[str, str], known: dict[str, KnownSegment]) -> list[Unit]:
    """Reads units.

    Args:
        stamps: the units to read, and their stamps.
        known: key -> segment that was read before, whose footer need not be read again.
    """
    known_of: dict[str, dict[str, KnownSegment]] = {}
    for key, entry in known.items():
        known_of.setdefault(f"runs/{entry.segment.run_id}", {})[key] = entry
    return [_read_unit(root, path, stamp, known_of.get(path, {})) for path, stamp in stamps.items()]


def _read_unit(root: Path, path: str, stamp: str, known: dict[str, KnownSegment]) -> Unit:
    # The order matters. States are read before segments, so that the evaluation that a state names is on disk.
    # Segments are listed before attempts are read, so that every row's attempt is known: it may replace earlier rows.
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
    # A damaged file that is restored in place changes no directory's time.
    is_whole = not documents.problems and not any(entry.problem for entry in segments)
    settled = stamp if is_whole and _is_settled(stamp) and _is_closed(root, path, rows, segments) else None
    if settled and path.startswith("runs/") and rows["runs"][0]["status"] in FINAL:
        settled += _HAS_ENDED
    return Unit(path, settled, rows, tuple(segments), bool(merged), tuple(documents.problems))


def _inspected(root: Path, segment: Segment, before: KnownSegment | None) -> KnownSegment | None:
    """None if the file was deleted meanwhile."""
    from storage.contents import inspect

    # What is wrong with a file's content its footer need not show. A file that is mended has another time.
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
    """Returns whether a later change of the directory will have another time, whatever the clock's steps are."""
    return max(map(int, stamp.split())) < time.time_ns() - _SETTLED_NS


def _is_closed(root: Path, path: str, rows: Rows, segments: list[KnownSegment]) -> bool:
    """Returns whether nothing changes in the unit unless its stamp does.

    That a run crashes changes no file. One that has crashed is taken up again with a new lease.
    """
    if not path.startswith("runs/"):
        return True
    (run,) = rows["runs"]
    waits = run["status"] == "pending" and not segments and not rows["attempts"]
    is_dead_for_good = run["status"] == "crashed" and is_dead(root / path, read_document(root / path / "state.json"))
    return run["status"] in FINAL or waits or is_dead_for_good


def _directories(root: Path, parent: str) -> Iterator[tuple[str, int]]:
    """Yields the directories in a directory of the home, by name: path in the home, and time of change in ns.

    One with another name than a unit can have is passed over: DuckDB would take a glob sign for one.
    """
    for entry in entries(root / parent):
        with suppress(OSError):
            if is_readable_name(entry.name) and entry.is_dir():
                yield f"{parent}/{entry.name}", entry.stat().st_mtime_ns


def _time_of(path: str) -> str:
    """Returns a directory's time of change, in ns; 0 where there is none."""
    try:
        return str(os.stat(path).st_mtime_ns)
    except OSError:
        return "0"


def problems(entries: Iterable[KnownSegment]) -> list[str]:
    """Returns a line for each segment that is skipped."""
    return [f"{entry.segment.key}: {entry.problem}" for entry in entries if entry.problem]


def known_units(connection: duckdb.DuckDBPyConnection, schema: str) -> dict[str, tuple[str | None, list[str]]]:
    """Returns the units of an index: their stamps, and what of their documents was passed over."""
    rows = connection.execute(f"SELECT unit, stamp, problems FROM {schema}.units").fetchall()
    return {unit: (stamp, problems or []) for unit, stamp, problems in rows}


def of_units(units: Iterable[str]) -> str:
    """SQL: whether a row with a `run_id` is of one of these units."""
    return f"{UNIT_OF_RUN} IN (SELECT unnest({quoted_list(units)}))"


def known_segments(connection: duckdb.DuckDBPyConnection, schema: str, condition: str) -> dict[str, KnownSegment]:
    """Returns the segments of an index that fulfil a condition in SQL, by key."""
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
