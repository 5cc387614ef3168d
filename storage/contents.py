"""The content of segments: their checked footers, and their rows as Arrow tables."""

import json
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specs.documents.reading import numbered, read_document
from specs.machine.foreign.limited import limited_memory
from specs.machine.foreign.tables import OversizedError, allowed_memory, require_parquet
from specs.segment_names import SegmentName, content_digest
from storage.catalogue import FREED
from storage.columns import arrow_schema
from storage.segments import BadSegmentError, Segment

_MOST_NAMES = 64 << 20
"""Largest size in bytes of the list of segments that a compacted segment replaces."""
MERGED = b"rpg.merged"
"""Key of a compacted segment's metadata: the names of all segments whose rows are in it."""


@dataclass(frozen=True, slots=True)
class Footer:
    """The data of a segment's footer."""

    num_rows: int
    current_columns: bool
    """Whether the columns are exactly the present ones."""
    merged: frozenset[str] = frozenset()
    """Names of the segments whose rows a compacted one contains."""


def merged_away(root: Path, segments: Iterable[Segment]) -> set[str]:
    """Returns the keys of a run's segments whose rows are in a compacted segment. They no longer count, and may be
    deleted."""
    listed = list(segments)
    merged = _merged_names(root, listed)
    return {s.key for s in listed if not s.is_of_evaluate_stage and s.name in merged.get(s.table, ())}


def half_written(root: Path, segments: Iterable[Segment]) -> set[str]:
    """Returns the keys of shares that do not count yet, because another rank's share is neither on disk nor in a
    compacted segment.

    If the directory was read between the writes of two ranks, the shares count later. If the run was killed between
    these writes, they never count.
    """
    listed = list(segments)
    ranks_of: dict[tuple[str, SegmentName], set[int]] = {}
    for segment in listed:
        if segment.parsed.ranks > 1:
            ranks_of.setdefault((segment.table, segment.parsed.first_share), set()).add(segment.parsed.rank)
    lacking = {first: set(range(first[1].ranks)) - ranks for first, ranks in ranks_of.items()}
    if not any(lacking.values()):  # the usual case: skips the names in compacted segments, hundreds of thousands
        return set()
    merged = _merged_names(root, listed)
    of_table = {table: {name.rpartition("-")[0] for name in names} for table, names in merged.items()}
    for (table, first), ranks in lacking.items():
        ranks -= {rank for rank in ranks if first.share(rank).stem in of_table.get(table, ())}
    return {s.key for s in listed if lacking.get((s.table, s.parsed.first_share))}


def lost(root: Path, run_id: str, before: Iterable[Segment], listed: Sequence[Segment]) -> list[Segment]:
    """Returns the segments of a run that existed before, and whose rows are lost.

    Merged rows are not lost: they are in another file. Freed rows, and rows of an earlier run or evaluation of that
    name, were deleted on purpose.

    Args:
        before: segments in the index.
        listed: segments that exist now.
    """
    here = {segment.key for segment in listed}
    missing = [segment for segment in before if segment.key not in here]
    if not missing:
        return []
    run = root / "runs" / run_id
    merged, unrecorded = _merged_names(root, listed, alone=True), left_out(run)
    # The document decides: a copy of a home may have files with other times.
    created = read_document(run / "run.json").get("created_at")
    began = datetime.fromisoformat(created).timestamp() * 1e9 if created else 0
    return [
        segment
        for segment in missing
        if segment.name not in merged.get(segment.table, ())
        and segment.table not in unrecorded
        and (_is_of_manifest(root, segment) if segment.is_of_evaluate_stage else segment.modified_ns >= began)
    ]


def left_out(directory: Path) -> set[str]:
    """Returns the tables that a run's settings exclude from the record, and those whose rows were freed after
    `keep_days`."""
    records = [read_document(path).get("record", {}) for path in numbered(directory / "attempts")]
    return {table for record in records for table in record if record[table] == "none"}.union(
        read_document(directory / FREED)
    )


def _is_of_manifest(root: Path, segment: Segment) -> bool:
    """Returns whether the manifest of an evaluate stage lists the segment."""
    directory = root.joinpath(*segment.key.split("/")[:4])
    files = read_document(directory / "manifest.json").get("files", {})
    return segment.key.split("/", 4)[4] in files


def _merged_names(root: Path, listed: Sequence[Segment], *, alone: bool = False) -> dict[str, set[str]]:
    """Returns the names of the segments whose rows are in compacted ones, by table.

    Args:
        alone: also read compacted segments that are the only ones of their table.
    """
    in_table = Counter(segment.table for segment in listed)
    merged: dict[str, set[str]] = {}
    for segment in listed:
        if segment.parsed.is_compacted and (alone or in_table[segment.table] > 1):
            try:
                merged.setdefault(segment.table, set()).update(inspect(root, segment).merged)
            except (BadSegmentError, FileNotFoundError):
                continue  # the segments that it replaced count, if they still exist
    return merged


@lru_cache(maxsize=2**17)
def inspect(root: Path, segment: Segment) -> Footer:
    """Returns a segment's footer. A process reads it only once, because a segment never changes.

    Raises:
        BadSegmentError: the file is truncated or not Parquet, or has wrong columns or a wrong run.
        FileNotFoundError: the file was deleted meanwhile.
    """
    try:
        if not stat.S_ISREG((root / segment.key).stat().st_mode):  # opening a named pipe would block
            raise BadSegmentError("no regular file")
        with pq.ParquetFile(root / segment.key) as file:
            require_parquet((root / segment.key).stat().st_size, file.metadata)
            _require_columns(file.schema_arrow, arrow_schema(segment.table))
            _require_run(file, segment.run_id)
            metadata = file.schema_arrow.metadata or {}
            merged = read_merged(metadata[MERGED]) if MERGED in metadata else frozenset()
            current = _same_columns(file.schema_arrow, arrow_schema(segment.table))
            return Footer(file.metadata.num_rows, current, merged)
    except FileNotFoundError:
        raise
    except OversizedError as error:
        raise BadSegmentError(f"foreign: {error}") from error
    except (pa.ArrowException, OSError, ValueError, zlib.error) as error:
        raise BadSegmentError(f"not a whole Parquet file: {_first_line(error)}") from error


def write_merged(names: Iterable[str]) -> bytes:
    """Returns the value of `MERGED`."""
    return zlib.compress(json.dumps(sorted(names)).encode())


def read_merged(value: bytes) -> frozenset[str]:
    """Returns the names in a value of `write_merged`. Raises ValueError or zlib.error for any other value."""
    names = zlib.decompressobj().decompress(value, _MOST_NAMES)
    return frozenset(json.loads(names))


def read(root: Path, segment: Segment) -> pa.Table:
    """Returns all rows of a segment; see `read_groups`."""
    groups = list(read_groups(root, segment))
    return pa.concat_tables(groups) if groups else arrow_schema(segment.table).empty_table()


def read_groups(root: Path, segment: Segment) -> Iterator[pa.Table]:
    """Yields the rows of a segment, one row group at a time, with the present columns. A column that an older file
    lacks is NULL.

    Raises:
        BadSegmentError: see `inspect`; or the data are damaged.
        FileNotFoundError: the file was deleted meanwhile.
    """
    inspect(root, segment)
    try:
        if (digest := segment.parsed.digest) and content_digest(root / segment.key) != digest:
            raise BadSegmentError("damaged: its content has changed")
        with pq.ParquetFile(root / segment.key) as file:
            memory = allowed_memory((root / segment.key).stat().st_size)
            for group in range(file.num_row_groups):
                with limited_memory(memory):
                    rows = file.read_row_group(group)
                columns = [_column(rows, field) for field in arrow_schema(segment.table)]
                yield pa.Table.from_arrays(columns, schema=arrow_schema(segment.table))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadSegmentError(f"damaged: {_first_line(error)}") from error


def is_damaged(root: Path, pack: str) -> bool:
    """Returns whether a pack's content disagrees with the digest in its name. `pack`: its path, relative to the home.

    Raises:
        FileNotFoundError: the pack was deleted meanwhile.
    """
    return content_digest(root / pack) != Path(pack).stem.rpartition("-")[2]


def _require_columns(schema: pa.Schema, expected: pa.Schema) -> None:
    for name in ("run_id", "step"):
        if name not in schema.names:
            raise BadSegmentError(f"foreign: it has no column `{name}`")
    for field in schema:
        if field.name in expected.names and not _fits(field.type, expected.field(field.name).type):
            wanted = expected.field(field.name).type
            raise BadSegmentError(f"foreign: column `{field.name}` is {field.type}, expected {wanted}")


def _fits(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Returns whether values of the first type fit into a column of the second."""
    families = (_is_number, pa.types.is_boolean, pa.types.is_timestamp, _is_text)
    return bool(pa.types.is_null(kind)) or any(family(kind) and family(wanted) for family in families)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


def _require_run(file: pq.ParquetFile, run_id: str) -> None:
    """Raises an error unless the first rows belong to the run in whose directory the file is. Uses the file's
    statistics if it has any."""
    if not file.metadata.num_rows:
        return
    group = file.metadata.row_group(0)
    columns = (group.column(index) for index in range(group.num_columns))
    statistics = next(column.statistics for column in columns if column.path_in_schema == "run_id")
    if statistics is not None and statistics.has_min_max:
        run_ids = [statistics.min, statistics.max]
    else:
        run_ids = pc.unique(file.read_row_group(0, columns=["run_id"]).column(0)).to_pylist()
    for other in run_ids:
        if other != run_id:
            raise BadSegmentError(f"foreign: it has rows of run `{other}`")


def _same_columns(schema: pa.Schema, expected: pa.Schema) -> bool:
    """Returns whether names and types agree. Whether a column may be NULL does not matter to a reader."""
    return [(field.name, field.type) for field in schema] == [(field.name, field.type) for field in expected]


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    if field.name not in table.column_names:
        return pa.nulls(len(table), field.type)
    return table.column(field.name).cast(field.type)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
