"""Compaction: a run's many small segments become one large file for each table, sorted by step.

A trainer writes a segment for each table and step. They are merged into files of growing size during the run, and into
one for each table when it has ended. A compacted file's metadata name the segments of its rows; from the rename that
publishes it, no reader of the directory counts those segments. An ingest deletes them some minutes later: readers'
snapshots use them until then.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specs.machine.files import sync
from specs.records import TABLES
from specs.segment_names import DigestedFile, SegmentName, content_digest
from storage.columns import arrow_schema
from storage.contents import MERGED, half_written, inspect, merged_away, read_groups, write_merged
from storage.segments import BadSegmentError, Segment, run_segments
from storage.units import KnownSegment

MOST_SMALL = 32
"""Number of a table's segments, written by the trainer, at which they are merged during a run."""
LARGEST_BYTES = 1 << 30
"""Size from which a compacted file is not merged further, in bytes."""
KEEP_SECONDS = 600.0
"""Seconds for which segments stay after they were merged into another."""
_ROWS_A_GROUP = 262_144
REPEATED = ["run_id", "name", "step", "position", "rollout_id", "attempt"]
"""Columns with repeated values. They are stored as dictionaries, which take half the time to read and no more space."""
_STALE_SECONDS = 86_400.0
"""Seconds after which a killed writer's temporary files are deleted."""


@dataclass(frozen=True)
class Compacted:
    """Result of compacting a run."""

    num_merged: int = 0
    """Number of segments that were merged into others."""
    damaged: tuple[KnownSegment, ...] = ()
    """Segments that could not be read. They stay in place, beside the merged file."""


def compact_run(root: Path, run_id: str, *, whole: bool, keep_seconds: float = KEEP_SECONDS) -> Compacted:
    """Merges a run's segments, and deletes segments from earlier merges.

    Only one process at a time may do this in a home: the caller holds the ingester's lock. If it is killed at any
    moment, every row still counts once: in the segments, or in the file that replaces them.

    Args:
        whole: the run's trainer has ended, so that all segments become one file for each table; if false, only numerous
            segments are merged, into files that grow geometrically, so that a row is rewritten a few times at most.
        keep_seconds: seconds for which merged segments stay.
    Raises:
        OSError: the disk is full or not writable. The old files are intact.
    """
    listed, gone = _listed(root, run_id)
    left_out = gone | half_written(root, listed)
    live = [segment for segment in listed if segment.key not in left_out and _is_good(root, segment)]
    num_merged, damaged = 0, list[KnownSegment]()
    for table in TABLES:
        num_merged += _merge_good(root, _to_merge([s for s in live if s.table == table], whole=whole), damaged)
    delete_merged(root, run_id, keep_seconds)
    _delete_stale(root / "runs" / run_id / "segments")
    return Compacted(num_merged, tuple(damaged))


def delete_merged(root: Path, run_id: str, keep_seconds: float = KEEP_SECONDS) -> None:
    """Deletes a run's segments whose rows are in an intact compacted file that is older than `keep_seconds`."""
    listed, gone = _listed(root, run_id)
    merged = [segment for segment in listed if segment.key in gone]
    holders = [segment for segment in listed if segment.parsed.is_compacted and segment.key not in gone]
    for holder in holders:
        names = inspect(root, holder).merged if _is_good(root, holder) else frozenset()
        held = [segment for segment in merged if segment.table == holder.table and segment.name in names]
        is_old = time.time() - holder.modified_ns / 1e9 >= keep_seconds
        if held and is_old and content_digest(root / holder.key) == holder.parsed.digest:
            for segment in held:
                (root / segment.key).unlink(missing_ok=True)


def _listed(root: Path, run_id: str) -> tuple[list[Segment], set[str]]:
    """Returns a run's segments except those of evaluate stages, and the keys of segments that were merged into
    others."""
    listed = [segment for segment in run_segments(root, run_id) if not segment.is_of_evaluate_stage]
    return listed, merged_away(root, listed)


def _to_merge(segments: Sequence[Segment], *, whole: bool) -> list[Segment]:
    """Returns the segments of a table that are to be merged into one."""
    growing = [segment for segment in segments if segment.num_bytes < LARGEST_BYTES]
    if whole:
        return growing if len(growing) > 1 else []
    chosen = [segment for segment in growing if not segment.parsed.is_compacted]
    if len(chosen) < MOST_SMALL:
        return []
    size = sum(segment.num_bytes for segment in chosen)
    for segment in sorted((s for s in growing if s.parsed.is_compacted), key=lambda s: s.num_bytes):
        if segment.num_bytes > 2 * size:
            break
        chosen.append(segment)
        size += segment.num_bytes
    return chosen


def _merge_good(root: Path, segments: Sequence[Segment], damaged: list[KnownSegment]) -> int:
    """Merges the readable segments, and adds the others to `damaged`. Returns how many were merged."""
    good = [*segments]
    while len(good) > 1:
        try:
            _merge(root, good)
        except _DamagedError as error:
            good.remove(error.segment)
            damaged.append(KnownSegment(error.segment, 0, False, str(error)))
        else:
            return len(good)
    return 0


class _DamagedError(Exception):
    """Error for a segment that cannot be read. The message says why."""

    def __init__(self, segment: Segment, problem: str) -> None:
        super().__init__(problem)
        self.segment = segment


def _merge(root: Path, segments: Sequence[Segment]) -> None:
    """Writes one file with the rows of all segments. If one is damaged, raises _DamagedError and changes nothing."""
    in_order = sorted(segments, key=lambda s: (s.parsed.first_step, s.parsed.number, s.parsed.rank))
    names = {segment.name for segment in segments}.union(*(inspect(root, segment).merged for segment in segments))
    schema = arrow_schema(segments[0].table).with_metadata({MERGED: write_merged(names)})
    directory = (root / segments[0].key).parent
    parsed = [segment.parsed for segment in segments]
    generation = 1 + max((name.number for name in parsed if name.is_compacted), default=0)
    first, last = min(name.first_step for name in parsed), max(name.last_step for name in parsed)
    aside = directory / f".c{generation:04}.{os.getpid()}.partial"
    try:
        with DigestedFile(aside) as file:
            write_rows(file, schema, (rows for segment in in_order for rows in _rows(root, segment)))
            os.fsync(file.fileno())
            name = SegmentName(True, generation, first, last, file.digest)
        aside.replace(directory / str(name))
    finally:
        aside.unlink(missing_ok=True)
    sync(directory)


def _rows(root: Path, segment: Segment) -> Iterator[pa.Table]:
    try:
        yield from read_groups(root, segment)
    except BadSegmentError as error:
        raise _DamagedError(segment, str(error)) from error


def write_rows(file: DigestedFile, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Writes the rows in groups of equal size, for tables of any size."""
    with pq.ParquetWriter(
        file, schema, compression="zstd", use_dictionary=REPEATED, write_statistics=["run_id", "step"]
    ) as writer:
        pending: list[pa.Table] = []
        for table in tables:
            pending.append(table)
            if sum(map(len, pending)) >= _ROWS_A_GROUP:
                writer.write_table(pa.concat_tables(pending).replace_schema_metadata(None), _ROWS_A_GROUP)
                pending = []
        if pending:
            writer.write_table(pa.concat_tables(pending).replace_schema_metadata(None), _ROWS_A_GROUP)


def _delete_stale(directory: Path) -> None:
    """Deletes killed writers' temporary files."""
    for path in directory.glob("*/.*.partial"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
        except FileNotFoundError:
            continue


def _is_good(root: Path, segment: Segment) -> bool:
    try:
        inspect(root, segment)
    except (BadSegmentError, FileNotFoundError):
        return False
    return True
