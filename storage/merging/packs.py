"""Packs: the small files of many ended runs in one file for each table, so that a query of all runs opens few files.

Opening a file costs a query 0.1 ms, as much as 20,000 values of a column. Packs belong to the index: a run's directory
still has the whole run, and the index's entry of a segment names the pack that also has its rows. The loss, damage or
age of a pack does no harm: its rows are then read from the runs' files, and later ingests write other packs.
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa

from specs.machine.files import sync
from specs.segment_names import DigestedFile
from storage.columns import PARQUET, arrow_schema
from storage.contents import read
from storage.database import has_pack, packs_path, quoted, quoted_list
from storage.merging.compaction import write_rows
from storage.segments import BadSegmentError
from storage.units import UNIT_OF_RUN, KnownSegment, known_segments

SMALL_BYTES = 8 << 20
"""Files of at least this size in bytes are not packed, because a query needs far more time to read their rows than to
open them."""
FEWEST = 32
"""A pack is written if at least this many small files of a table are not in packs."""
LARGEST_BYTES = 256 << 20
"""Largest number of bytes of all files in a pack, which is about the size of the pack."""


def write_packs(connection: duckdb.DuckDBPyConnection, root: Path) -> None:
    """Packs the small files that are not in a pack yet, if there are enough of them, together with packs of similar
    size.

    So a row is rewritten a few times at most.

    Args:
        connection: connection to the index that is being written. If the process is killed before it publishes the
            index, the new files stay unused.
    """
    for table in PARQUET:
        for members in _to_pack(connection, table):
            with contextlib.suppress(OSError):  # for example a full disk: the files stay unchanged
                _write_pack(connection, root, table, members)


def _to_pack(connection: duckdb.DuckDBPyConnection, table: str) -> Iterator[list[KnownSegment]]:
    """Yields a table's segments for each new pack, ordered by run."""
    chosen = _loose(connection, table)
    if len(chosen) < FEWEST:
        return
    size = sum(entry.segment.num_bytes for entry in chosen)
    packs = connection.execute(
        f"SELECT sum(num_bytes)::BIGINT, pack FROM recorded.segments WHERE table_name = {quoted(table)}"
        " AND pack IS NOT NULL GROUP BY pack ORDER BY ALL"
    ).fetchall()
    for num_bytes, pack in packs:
        if num_bytes > 2 * size or num_bytes + size > LARGEST_BYTES:
            break
        size += num_bytes
        chosen += known_segments(connection, "recorded", f"pack = {quoted(pack)}").values()
    members, taken = list[KnownSegment](), 0
    for entry in sorted(chosen, key=lambda entry: (entry.segment.run_id, entry.segment.key)):
        if taken >= LARGEST_BYTES and entry.segment.run_id != members[-1].segment.run_id:
            yield members
            members, taken = [], 0
        members.append(entry)
        taken += entry.segment.num_bytes
    yield members


def _loose(connection: duckdb.DuckDBPyConnection, table: str) -> list[KnownSegment]:
    """Returns a table's small files of ended runs that are not in a pack. Segments that are still to be merged are left
    out."""
    condition = (
        f"table_name = {quoted(table)} AND problem IS NULL AND pack IS NULL"
        f" AND num_bytes < {SMALL_BYTES}"
        f" AND {UNIT_OF_RUN} IN (SELECT unit FROM recorded.units WHERE stamp IS NOT NULL)"
        " AND (contains(key, '/evaluate/') OR run_id NOT IN (SELECT run_id FROM recorded.segments"
        f" WHERE table_name = {quoted(table)} AND problem IS NULL AND NOT contains(key, '/evaluate/')"
        " GROUP BY run_id HAVING count(*) > 1))"
    )
    return [*known_segments(connection, "recorded", condition).values()]


def _write_pack(connection: duckdb.DuckDBPyConnection, root: Path, table: str, members: Sequence[KnownSegment]) -> None:
    """Writes one pack, and records it in the index. Unreadable segments are left out."""
    directory = packs_path(root)
    directory.mkdir(exist_ok=True)
    aside = directory / f".{table}.{os.getpid()}.partial"
    packed: list[str] = []
    try:
        with DigestedFile(aside) as file:
            write_rows(file, arrow_schema(table), _rows(root, members, packed))
            os.fsync(file.fileno())
        pack, num_bytes = f"{directory.name}/{table}-{file.digest}.parquet", aside.stat().st_size
        aside.replace(root / pack)
    finally:
        aside.unlink(missing_ok=True)
    sync(directory)
    _forget(connection, {entry.pack for entry in members if entry.pack})
    connection.execute(
        f"UPDATE recorded.segments SET pack = {quoted(pack)} WHERE key IN (SELECT unnest({quoted_list(packed)}));"
        f" INSERT INTO recorded.packed SELECT pack, table_name, {num_bytes}, run_id, count(*)"
        f" FROM recorded.segments WHERE pack = {quoted(pack)} GROUP BY ALL"
    )


def _rows(root: Path, members: Sequence[KnownSegment], packed: list[str]) -> Iterator[pa.Table]:
    """Yields a table of rows for each member, with the present columns and the run from the member's path. Adds the
    member's key to `packed`."""
    for segment in (entry.segment for entry in members):
        try:
            rows = read(root, segment)
        except (BadSegmentError, FileNotFoundError):
            continue
        packed.append(segment.key)
        index = rows.schema.get_field_index("run_id")
        yield rows.set_column(index, rows.schema.field(index), pa.repeat(segment.run_id, len(rows)))


def _forget(connection: duckdb.DuckDBPyConnection, packs: Collection[str]) -> None:
    listed = quoted_list(packs)
    connection.execute(
        f"UPDATE recorded.segments SET pack = NULL WHERE pack IN (SELECT unnest({listed}));"
        f" DELETE FROM recorded.packed WHERE pack IN (SELECT unnest({listed}))"
    )


def drop_outdated(connection: duckdb.DuckDBPyConnection, root: Path) -> None:
    """Removes entries of packs, and of runs in packs, that are outdated because segments have changed.

    A whole pack is removed when its file is gone, a run in it was deleted, or the rows of half of its runs no longer
    count.
    """
    connection.execute(
        "UPDATE recorded.segments AS s SET pack = NULL WHERE pack IS NOT NULL AND (pack, run_id) NOT IN ("
        " SELECT (p.pack, p.run_id) FROM recorded.packed AS p JOIN recorded.segments AS s USING (pack, run_id)"
        " GROUP BY p.pack, p.run_id, p.num_segments HAVING count(*) = p.num_segments)"
    )
    listed = connection.execute(
        "SELECT pack, any_value(num_bytes), bool_or(run_id NOT IN (SELECT run_id FROM recorded.runs))"
        " OR avg(((pack, run_id) IN (SELECT (pack, run_id) FROM recorded.segments))::INT) < 0.5"
        " FROM recorded.packed GROUP BY pack"
    ).fetchall()
    _forget(connection, [pack for pack, size, is_old in listed if is_old or not has_pack(root, pack, size)])


def delete_others(root: Path, named: Collection[str], before: Collection[str], keep_seconds: float) -> None:
    """Deletes the files of unused packs.

    Args:
        named: packs of the index that was just published.
        before: packs of the index that it replaced. Readers may still use them: they stay for `keep_seconds` from now.
    """
    for pack in {*before} - {*named}:
        with contextlib.suppress(FileNotFoundError):
            os.utime(root / pack)
    kept = {root / pack for pack in named}
    for path in packs_path(root).glob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path not in kept and time.time() - path.stat().st_mtime >= keep_seconds:
                path.unlink()


def packs_in(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """Returns the packs in the index that is being written."""
    return {pack for (pack,) in connection.execute("SELECT DISTINCT pack FROM recorded.packed").fetchall()}
