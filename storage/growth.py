"""Reading of new steps of a run that trains from its own files. This is fast enough for a reader that follows many
runs."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from specs.segment_names import parse_segment_name
from storage.columns import arrow_schema
from storage.contents import read
from storage.segments import Segment, entries


def new_rows(root: Path, run_id: str, table: str, attempt: int, from_step: int) -> pa.Table:
    """Returns the rows of a table that an attempt of a run has written from a step on.

    Only the rows of a run's last attempt all count: see the view of the table for those of earlier ones.

    Raises:
        BadSegmentError: a file is damaged.
        FileNotFoundError: a file was merged into another meanwhile.
    """
    found = [arrow_schema(table).empty_table()]
    for entry in entries(root / "runs" / run_id / "segments" / table):
        name = parse_segment_name(entry.name)
        if name is None or name.last_step < from_step or not (name.is_compacted or name.number == attempt):
            continue
        stat = entry.stat()
        key = f"runs/{run_id}/segments/{table}/{entry.name}"
        rows = read(root, Segment(key, table, run_id, stat.st_size, stat.st_mtime_ns))
        counts = pc.and_(pc.equal(rows["attempt"], attempt), pc.greater_equal(rows["step"], from_step))
        found.append(rows.filter(counts))
    return pa.concat_tables(found)
