"""The ingester, which updates the index from the directories. Only one works at a time."""

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
from filelock import FileLock

from specs.errors import RpgError
from specs.machine.liveness import FINAL
from storage import catalogue, database
from storage.columns import NATIVE, PARQUET, column_list
from storage.contents import inspect, read
from storage.documentation import comment
from storage.merging import packs
from storage.merging.compaction import KEEP_SECONDS, LARGEST_BYTES, Compacted, compact_run, delete_merged
from storage.provenance import unit_provenance
from storage.relations import SUMMARY, in_segments, known_packs, rewards, views
from storage.segments import BadSegmentError
from storage.units import (
    KnownSegment,
    Unit,
    as_row,
    known_segments,
    known_units,
    of_units,
    problems,
    read_units,
    unit_stamps,
)

_log = logging.getLogger("storage")
_UNITS_AT_ONCE = 256
"""Largest number of units whose rows are in memory at the same time."""
_WITH_MERGED = "SELECT unit FROM store.recorded.units WHERE has_merged"
_OVER = (*FINAL, "crashed")
"""Statuses of a run without a live process. A crashed run may be resumed."""


@dataclass(frozen=True)
class Ingested:
    """Result of an ingest."""

    segments: int = 0
    """Number of segments that are new in the index."""
    removed: int = 0
    """Number of segments that are no longer in the index: deleted, changed, or merged into others."""
    merged: int = 0
    """Number of segments that were merged."""
    skipped: tuple[str, ...] = ()
    """A line for each damaged or misplaced file of the runs that were read."""


def ingest(
    home_root: Path,
    *,
    wait_seconds: float = -1,
    compact: str = "",
    whole: bool = False,
    keep_seconds: float = KEEP_SECONDS,
) -> Ingested:
    """Updates the index from the disk.

    Only one ingester works at a time, under a file lock held from before the database is opened until the new one is
    published; readers do not use the lock. If it is killed at any moment, it has published everything or nothing.

    Args:
        wait_seconds: how long to wait for another ingester; -1 for no limit.
        compact: a run whose segments are merged first, if they are numerous. If the disk has no space for the copy, a
            warning says so, and they stay unchanged.
        whole: that run's trainer has ended: it gets one file for each table. One more run is merged like this, if there
            is one whose own flow ended before its merge. Numerous small files outside packs are packed.
        keep_seconds: how long merged segments and packs stay for readers of the old index.
    Raises:
        filelock.Timeout: another ingester worked all that time.
    """
    root = Path(home_root).absolute()
    with _lock(root, wait_seconds), _Index(root) as index:
        done = []
        for run_id in filter(None, [compact, index.left_unmerged(but=compact) if whole else None]):
            try:
                done.append(compact_run(root, run_id, whole=whole, keep_seconds=keep_seconds))
            except OSError as error:  # another's run may belong to another user, or be deleted meanwhile
                if run_id == compact:
                    _log.warning("the files of %s are intact, but cannot be merged: %s", run_id, error)
        for run_id in index.runs_with_merged():
            delete_merged(root, run_id, keep_seconds)
        return _ingest(root, index, done, pack=whole, keep_seconds=keep_seconds)


def rebuild(home_root: Path) -> Ingested:
    """Rebuilds the database from the run directories. Readers use the old one until the new one is complete."""
    root = Path(home_root).absolute()
    if not database.has_index(root):
        hint = "queries read the runs' files, which takes longer; move the home to have an index"
        raise RpgError(f"{root}: DuckDB keeps no database below a directory whose name has a `?`\n  hint: {hint}")
    with _lock(root, -1):
        return _ingested(root, None, (), pack=True)


def compact(home_root: Path, run_ids: Collection[str] = (), *, keep_seconds: float = KEEP_SECONDS) -> Ingested:
    """Merges the segments of ended runs into one file for each table and run, packs the small merged files, and deletes
    segments from earlier merges.

    Args:
        run_ids: the runs to compact; empty means all.
        keep_seconds: how long merged segments and packs stay for readers of the old index.
    """
    root = Path(home_root).absolute()
    with _lock(root, -1):
        with _Index(root) as index:
            _ingest(root, index)
        with _Index(root) as index:
            done = [
                compact_run(root, run_id, whole=True, keep_seconds=keep_seconds)
                for run_id in index.ended()
                if not run_ids or run_id in run_ids
            ]
            return _ingest(root, index, done, pack=True, keep_seconds=keep_seconds)


def _lock(root: Path, wait_seconds: float) -> FileLock:
    path = root / "locks" / "ingest.lock"
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    path.parent.mkdir(exist_ok=True)
    return FileLock(path, timeout=wait_seconds)


class _Index:
    """A connection to the published index, for all queries of an ingest that makes the next index.

    A missing, damaged or other version's index counts as empty.
    """

    def __init__(self, root: Path) -> None:
        self._connection = database.connect()
        self._usable = database.attach(self._connection, root) is None

    def __enter__(self) -> "_Index":
        return self

    def __exit__(self, *_error: object) -> None:
        self._connection.close()

    def ended(self) -> list[str]:
        """Returns the runs without a live process."""
        return self._texts(f"SELECT run_id FROM store.recorded.runs WHERE status IN {_OVER}")

    def left_unmerged(self, but: str) -> str | None:
        """Returns a run without a live process whose segments in the index need a merge; None if there is no such run.

        Chooses at random: a run that cannot be merged does not block the others.
        """
        left = self._texts(
            "SELECT run_id FROM store.recorded.segments JOIN store.recorded.runs USING (run_id)"
            f" WHERE status IN {_OVER} AND run_id <> {database.quoted(but)} AND problem IS NULL"
            f" AND num_bytes < {LARGEST_BYTES} AND NOT contains(key, '/evaluate/')"
            " GROUP BY run_id, table_name HAVING count(*) > 1 ORDER BY random() LIMIT 1"
        )
        return left[0] if left else None

    def runs_with_merged(self) -> list[str]:
        """Returns the runs with segments that were merged into others."""
        return [unit.removeprefix("runs/") for unit in self._texts(_WITH_MERGED)]

    def stamps(self) -> dict[str, str | None] | None:
        """Returns the units in the index, and their stamps; None if the index is unusable.

        A unit with merged segments has no stamp: they may have been deleted.
        """
        if self._usable:
            with contextlib.suppress(duckdb.Error):
                stamps = {unit: stamp for unit, (stamp, _) in known_units(self._connection, "store.recorded").items()}
                had_merged = self._connection.execute(_WITH_MERGED).fetchall()
                return stamps | {unit: None for (unit,) in had_merged}
        return None

    def _texts(self, sql: str) -> list[str]:
        if self._usable:
            with contextlib.suppress(duckdb.Error):
                return [text for (text,) in self._connection.execute(sql).fetchall()]
        return []


def _ingest(
    root: Path,
    index: _Index,
    compacted: Sequence[Compacted] = (),
    *,
    pack: bool = False,
    keep_seconds: float = KEEP_SECONDS,
) -> Ingested:
    indexed = index.stamps()
    try:
        return _ingested(root, indexed, compacted, pack=pack, keep_seconds=keep_seconds)
    except duckdb.Error:
        if indexed is None:
            raise
        # For example a damaged block of the index: all its data can be read again from the directories.
        return _ingested(root, None, compacted, pack=pack, keep_seconds=keep_seconds)


def _ingested(
    root: Path,
    indexed: Mapping[str, str | None] | None,
    compacted: Sequence[Compacted],
    *,
    pack: bool,
    keep_seconds: float = KEEP_SECONDS,
) -> Ingested:
    """
    Updates the index, or rebuilds it without `indexed`. Args: indexed: the units in the index, and their stamps.
    """
    merged = sum(done.num_merged for done in compacted)
    if not database.has_index(root):
        return Ingested(merged=merged)
    damaged = {entry.segment.key: entry for done in compacted for entry in done.damaged}
    stamps = unit_stamps(root, indexed or {})
    again = {f"runs/{entry.segment.run_id}" for entry in damaged.values()}
    changed = {u: s for u, s in stamps.items() if indexed is None or u in again or indexed.get(u) != s}
    gone = [unit for unit in indexed or () if unit not in stamps]
    if indexed is not None and not changed and not gone and not pack:
        return Ingested(merged=merged)
    connection = database.create(root) if indexed is None else database.open_copy(root)
    try:
        connection.execute("BEGIN")
        known = known_segments(connection, "recorded", of_units([*changed, *gone]))
        before = packs.packs_in(connection)
        _remove(connection, [*changed, *gone])
        entries: list[KnownSegment] = []
        names = sorted(changed)
        for start in range(0, len(names), _UNITS_AT_ONCE):
            some = {name: changed[name] for name in names[start : start + _UNITS_AT_ONCE]}
            entries += _insert(connection, root, read_units(root, some, known | damaged))
        packs.drop_outdated(connection, root)
        if pack:
            packs.write_packs(connection, root)
        connection.execute("COMMIT")  # before the views: an error about a file would end the transaction
        _name_segments(connection, root)
        named = packs.packs_in(connection)
        if indexed is None:
            _create_views(connection)
        connection.execute("CHECKPOINT")
    finally:
        connection.close()
    database.publish(root)
    packs.delete_others(root, named, before, keep_seconds)
    read = {entry.segment.key for entry in entries if not entry.problem}
    left = known.keys() - {entry.segment.key for entry in entries}
    return Ingested(len(read - known.keys()), len(left), merged, tuple(problems(entries)))


def _remove(connection: duckdb.DuckDBPyConnection, units: list[str]) -> None:
    for table in ("units", *catalogue.TABLES):
        connection.execute(f"DELETE FROM recorded.{table} WHERE unit IN (SELECT unnest({database.quoted_list(units)}))")
    for table in ("segments", SUMMARY, *NATIVE):
        connection.execute(f"DELETE FROM recorded.{table} WHERE {of_units(units)}")


def _insert(connection: duckdb.DuckDBPyConnection, root: Path, units: list[Unit]) -> list[KnownSegment]:
    """Adds the units' rows. Returns the units' segments, with the problems found."""
    for table in catalogue.TABLES:
        rows = [row for unit in units for row in unit.rows.get(table, ())]
        database.insert_rows(connection, f"recorded.{table}", rows)
    provenance = [row for unit in units for row in unit_provenance(root, unit.path)]
    database.insert_plain_rows(connection, "recorded.provenance", provenance)
    copied: dict[str, list[pa.Table]] = {table: [] for table in NATIVE}
    entries = []
    for entry in (entry for unit in units for entry in unit.segments):
        try:
            if entry.segment.table in NATIVE and not entry.problem:
                copied[entry.segment.table].append(read(root, entry.segment))
            entries.append(entry)
        except BadSegmentError as error:
            entries.append(KnownSegment(entry.segment, 0, False, str(error)))
        except FileNotFoundError:
            continue  # deleted meanwhile
    for table, parts in copied.items():
        _insert_copied(connection, table, parts)
    database.insert_rows(connection, f"recorded.{SUMMARY}", _rewards(root, units))
    database.insert_rows(connection, "recorded.segments", [as_row(entry) for entry in entries])
    damaged = {f"runs/{entry.segment.run_id}" for entry in entries if entry.problem}
    read_as = [
        {
            "unit": unit.path,
            "stamp": unit.stamp if unit.path not in damaged else None,
            "has_merged": unit.has_merged,
            "problems": list(unit.problems) or None,
        }
        for unit in units
    ]
    database.insert_rows(connection, "recorded.units", read_as)
    return entries


def _insert_copied(connection: duckdb.DuckDBPyConnection, table: str, parts: list[pa.Table]) -> None:
    if parts:
        connection.register("incoming", pa.concat_tables(parts))
        names = column_list(table)
        connection.execute(f"INSERT INTO recorded.{table} ({names}) SELECT {names} FROM incoming")
        connection.unregister("incoming")


def _rewards(root: Path, units: list[Unit]) -> list[catalogue.Row]:
    """Returns the rows of the summary of runs. A run with unreadable metrics has no rows, so that readers read the
    metrics and report the damage."""
    runs = [unit for unit in units if unit.path.startswith("runs/")]
    if not runs:
        return []
    with database.connect() as connection:  # an error would end the transaction on the ingester's own
        database.create_tables(connection, "recorded")
        database.insert_rows(connection, "recorded.attempts", [row for unit in runs for row in unit.rows["attempts"]])
        connection.execute(f"CREATE VIEW recorded.superseded AS {views()['recorded.superseded'].select}")
        try:
            return _rewards_of(connection, root, runs)
        except duckdb.Error:
            rows = []
            for run in runs:
                with contextlib.suppress(duckdb.Error):
                    rows += _rewards_of(connection, root, [run])
            return rows


def _rewards_of(connection: duckdb.DuckDBPyConnection, root: Path, runs: list[Unit]) -> list[catalogue.Row]:
    entries = [
        entry for run in runs for entry in run.segments if entry.segment.table == "metrics" and not entry.problem
    ]
    current = [entry.segment for entry in entries if entry.current_columns]
    other = [entry.segment for entry in entries if not entry.current_columns]
    resumed = {row[0] for row in connection.execute("SELECT run_id FROM recorded.superseded").fetchall()}
    summaries = connection.execute(rewards(in_segments("metrics", root, current, other, resumed))).fetchall()
    known = {row[0]: dict(zip(("last_step", "reward_first", "reward_last"), row[1:], strict=True)) for row in summaries}
    return [{"run_id": run_id} | known.get(run_id, {}) for run in runs for run_id in [Path(run.path).name]]


def _name_segments(connection: duckdb.DuckDBPyConnection, root: Path) -> None:
    """Creates the relations over the present segments, on which the contract's views are based.

    They are for programs that open the file directly: the store's own readers create their own. So a file that
    disappears or is damaged meanwhile stops no ingest; its table is created without it, or at worst without any file.
    """
    connection.execute(f"CREATE OR REPLACE VIEW recorded.superseded AS {views()['recorded.superseded'].select}")
    resumed = connection.execute("SELECT DISTINCT run_id FROM recorded.superseded").fetchall()
    superseded = {run_id for (run_id,) in resumed}
    for table in PARQUET:
        condition = f"problem IS NULL AND pack IS NULL AND table_name = '{table}'"
        listed = known_segments(connection, "recorded", condition).values()
        packed = known_packs(connection, "recorded", table, "true")
        for entries, packs_of in ((listed, packed), (_whole(root, listed), packed), ([], ())):
            current = [entry.segment for entry in entries if entry.current_columns]
            other = [entry.segment for entry in entries if not entry.current_columns]
            rows = in_segments(table, root, current, other, superseded, packs_of)
            with contextlib.suppress(duckdb.IOException, duckdb.InvalidInputException):
                connection.execute(f"CREATE OR REPLACE VIEW recorded.{table} AS {rows}")
                break


def _whole(root: Path, entries: Iterable[KnownSegment]) -> list[KnownSegment]:
    """Returns the segments whose files exist and have intact footers. DuckDB refuses a view over other files."""
    whole = []
    for entry in entries:
        with contextlib.suppress(BadSegmentError, FileNotFoundError):
            if (root / entry.segment.key).stat().st_size == entry.segment.num_bytes:
                inspect(root, entry.segment)
                whole.append(entry)
    return whole


def _create_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Creates the contract's tables and views, for programs that open the file directly, with comments on their
    meaning."""
    connection.execute("BEGIN")  # each statement by itself would wait for the disk
    for name, view in views().items():
        connection.execute(f"CREATE OR REPLACE VIEW {name} AS {view.select}")
    comment(connection)
    connection.execute("COMMIT")
