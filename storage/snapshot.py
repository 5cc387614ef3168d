"""A consistent view of the whole record: the published index, and later changes from the directories."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import duckdb

from specs.records import TABLES
from storage import catalogue, database
from storage.columns import NATIVE
from storage.documentation import comment
from storage.provenance import unit_provenance
from storage.relations import SUMMARY, Pack, in_segments, known_packs, rewards, views
from storage.segments import BadSegmentError, Segment
from storage.units import (
    GONE,
    UNIT_OF_RUN,
    KnownSegment,
    known_segments,
    known_units,
    of_units,
    problems,
    read_units,
    unit_stamps,
)

_log = logging.getLogger("storage")
_ABOUT_TABLES = re.compile(
    r"\b(show|pragma\w*|information_schema|pg_catalog|sqlite_master|duckdb_\w+)\b", re.IGNORECASE
)
"""Matches a query that asks which tables exist."""


class Snapshot:
    """A connection with every table and view of one moment.

    Those with rows in many files are created when a query first names them.

    Args:
        damaged: keys of segments and packs that were found damaged -> the damage: they are left out.
        index: whether the index may be read; false if it was found damaged.
        sql: the query that needs the snapshot. In runs that have ended, only files of tables that the query names are
            checked; another missing file is noticed when it is read. None for any query.
    """

    def __init__(
        self, root: Path, *, damaged: Mapping[str, str] | None = None, index: bool = True, sql: str | None = None
    ) -> None:
        self.root = root
        self.connection = database.connect()
        if database.as_pattern(root) != str(root):
            # DuckDB copies an inlined CTE together with the paths it found, and reads those as patterns again.
            self.connection.execute("SET disabled_optimizers = 'cte_inlining'")
        warnings = []
        obstacle = database.attach(self.connection, root) if index else "damaged"
        if obstacle and obstacle != "missing":
            warnings.append(f"experiments.duckdb is {obstacle}; reading the segments (`rpg db rebuild` rebuilds it)")
        self._attached = not obstacle
        indexed = known_units(self.connection, "store.recorded") if self._attached else {}
        tables = TABLES if sql is None else _tables_in(sql)
        stamps = unit_stamps(root, {unit: stamp for unit, (stamp, _) in indexed.items()}, tables)
        unknown = ("", list[str]())
        changed = {unit: stamp for unit, stamp in stamps.items() if indexed.get(unit, unknown)[0] != stamp}
        self.num_unknown = sum(indexed.get(unit, unknown)[0] is not None for unit in changed)
        """Number of units whose present state is not in the index, not counting those that change all the time."""
        fresh = read_units(root, changed, self._known(of_units(changed)) if changed else {})
        self._outdated = {*changed, *(indexed.keys() - stamps.keys())}
        self._fresh = [entry for unit in fresh for entry in unit.segments]
        self._damaged = dict(damaged or {})
        self._create_catalogue([unit.rows for unit in fresh])
        self._without_provenance = [unit.path for unit in fresh]
        """Units whose rows of `provenance` are not in a table yet, because few queries need them."""
        self._made: set[str] = set()
        self._make(name for name, view in views().items() if not view.tables)
        skipped = [line for unit, (_, lines) in indexed.items() if unit not in self._outdated for line in lines]
        skipped += [line for unit in fresh for line in unit.problems]
        skipped += problems([*self._indexed("problem IS NOT NULL"), *self._fresh])
        skipped += [f"{key}: {problem}" for key, problem in self._damaged.items() if self._is_listed(key, problem)]
        self.warnings = (*warnings, *(f"skipped {line}" for line in skipped))
        for warning in self.warnings:
            _log.warning(warning)

    def close(self) -> None:
        """Closes the files."""
        self.connection.close()

    def provide(self, sql: str) -> None:
        """Creates the tables and views that a query names, or all of them if the query asks which exist."""
        named = set(views()) if _ABOUT_TABLES.search(sql) else _views_in(sql)
        if "provenance" in named:
            self._read_provenance()
        self._make(named)
        if "comment" in sql.lower():
            comment(self.connection)

    def provide_all(self) -> None:
        """Creates all tables and views."""
        self._read_provenance()
        self._make(views())

    def segments_of(self, sql: str) -> list[Segment]:
        """Returns the segments that a query may read."""
        return [entry.segment for table in sorted(_read_for(sql)) for entry in self._entries(table)]

    def packs_of(self, sql: str) -> list[str]:
        """Returns the packs that a query may read: their paths, relative to the home."""
        return [pack.key for table in sorted(_tables_in(sql)) for pack in self._packs(table)]

    def _create_catalogue(self, fresh: Collection[catalogue.Rows]) -> None:
        connection = self.connection
        connection.execute("CREATE SCHEMA recorded")
        if self._attached and not self._outdated:  # everything is in the index
            for table in catalogue.TABLES:
                connection.execute(f"CREATE VIEW recorded.{table} AS {self._stored(table, 'unit')}")
            return
        database.create_tables(connection, "fresh")
        for table in catalogue.TABLES:
            database.insert_rows(connection, f"fresh.{table}", [row for rows in fresh for row in rows.get(table, ())])
        connection.execute("CREATE TABLE fresh.outdated (unit VARCHAR)")
        database.insert_rows(connection, "fresh.outdated", [{"unit": unit} for unit in sorted(self._outdated)])
        for table in catalogue.TABLES:
            stored = f"{self._stored(table, 'unit')} UNION ALL BY NAME" if self._attached else ""
            connection.execute(f"CREATE VIEW recorded.{table} AS {stored} FROM fresh.{table}")

    def _read_provenance(self) -> None:
        rows = [row for unit in self._without_provenance for row in unit_provenance(self.root, unit)]
        database.insert_plain_rows(self.connection, "fresh.provenance", rows)
        self._without_provenance = []

    def _stored(self, table: str, unit: str) -> str:
        """Returns the still valid rows of an index's table. `unit`: SQL for the unit of a row."""
        return f"SELECT * FROM store.recorded.{table} WHERE {self._holds(unit)}"

    def _holds(self, unit: str) -> str:
        """Returns SQL that is true if the index's data of a unit are still valid."""
        return f"{unit} NOT IN (FROM fresh.outdated)" if self._outdated else "true"

    def _make(self, names: Iterable[str]) -> None:
        """Creates views, and the views that they are based on."""
        for name in dict.fromkeys(name for view in names for name in (*views()[view].over, view)):
            if name in self._made:
                continue
            for table in views()[name].tables - self._made:
                self.connection.execute(f"CREATE VIEW recorded.{table} AS {self._relation(table)}")
                self._made.add(table)
            self.connection.execute(f"CREATE VIEW {name} AS {views()[name].select}")
            self._made.add(name)

    def _relation(self, table: str) -> str:
        """Returns the rows of a table that is recorded in segments, both those copied into the index and those in
        files."""
        if table == SUMMARY:
            made = rewards(self._in_files("metrics", self._entries(SUMMARY)))
            return f"{self._stored(SUMMARY, UNIT_OF_RUN)} UNION ALL BY NAME ({made})" if self._attached else made
        if table in NATIVE and self._attached:
            fresh = [entry for entry in self._fresh if entry.segment.table == table]
            return f"{self._stored(table, UNIT_OF_RUN)} UNION ALL BY NAME {self._in_files(table, fresh)}"
        packs = self._packs(table)
        return self._in_files(table, self._entries(table, packs), packs)

    def _packs(self, table: str) -> list[Pack]:
        """Returns a table's readable packs."""
        if not self._attached:
            return []
        packs = known_packs(self.connection, "store.recorded", table, self._holds(UNIT_OF_RUN))
        return [p for p in packs if p.key not in self._damaged and database.has_pack(self.root, p.key, p.num_bytes)]

    def _in_files(self, table: str, entries: Iterable[KnownSegment], packs: Iterable[Pack] = ()) -> str:
        """Returns the rows of a table in these segments, without damaged ones, and in these packs."""
        read = [entry for entry in entries if not entry.problem and entry.segment.key not in self._damaged]
        current = [entry.segment for entry in read if entry.current_columns]
        other = [entry.segment for entry in read if not entry.current_columns]
        return in_segments(table, self.root, current, other, () if table in NATIVE else self._resumed(), packs)

    def _entries(self, table: str, packs: Iterable[Pack] = ()) -> list[KnownSegment]:
        """Returns a table's segments that are not in these packs. For the summary, returns the segments of runs that
        the index's summary lacks.
        """
        if table == SUMMARY:
            indexed = self._indexed(
                "table_name = 'metrics' AND run_id NOT IN (SELECT run_id FROM store.recorded.rewards)"
            )
            table = "metrics"
        else:
            packed = database.quoted_list(pack.key for pack in packs)
            indexed = self._indexed(f"table_name = '{table}' AND (pack IS NULL OR NOT list_contains({packed}, pack))")
        return [*indexed, *(entry for entry in self._fresh if entry.segment.table == table)]

    def _indexed(self, condition: str) -> list[KnownSegment]:
        """Returns the valid segments in the index that meet a condition in SQL."""
        known = self._known(condition).values()
        return [entry for entry in known if f"runs/{entry.segment.run_id}" not in self._outdated]

    def _is_listed(self, key: str, problem: str) -> bool:
        """Returns whether answers must leave out the file. They need not if the file is missing and the index no longer
        lists it.
        """
        return problem != GONE or bool(self._indexed(f"key = {database.quoted(key)}"))

    def _known(self, condition: str) -> dict[str, KnownSegment]:
        return known_segments(self.connection, "store.recorded", condition) if self._attached else {}

    def _resumed(self) -> set[str]:
        """Returns the runs of which some rows are superseded."""
        return {row[0] for row in self.connection.execute("SELECT DISTINCT run_id FROM recorded.superseded").fetchall()}


def _views_in(sql: str) -> set[str]:
    """Returns the views whose names occur as words in a query: those that it reads, and possibly others."""
    return set(re.findall(r"\w+", sql.lower())) & views().keys()


def _read_for(sql: str) -> set[str]:
    """Returns the tables of recorded rows, or made from them, that a query may read."""
    return {table for name in _views_in(sql) for table in views()[name].tables}


def _tables_in(sql: str) -> set[str]:
    """Returns the tables that a query may read, except the summary, which an ingest makes."""
    return _read_for(sql) - {SUMMARY}


def find_damage(snapshot: Snapshot, sql: str, error: duckdb.Error) -> dict[str, str]:
    """Returns the damaged or missing files behind a query's error, by key: those that the error names, else those found
    among all files that the query reads."""
    from storage.contents import is_damaged, read

    packs, segments = snapshot.packs_of(sql), snapshot.segments_of(sql)
    named_packs = [pack for pack in packs if pack in str(error)]
    named = [segment for segment in segments if segment.key in str(error)]
    if named or named_packs:
        packs, segments = named_packs, named
    damaged = {}
    for pack in packs:
        with suppress(FileNotFoundError):
            if is_damaged(snapshot.root, pack):
                damaged[pack] = "damaged; its rows are read from the runs' own files (`rpg db rebuild` rebuilds it)"
    for segment in segments:
        try:
            read(snapshot.root, segment)
        except BadSegmentError as problem:
            damaged[segment.key] = str(problem)
        except FileNotFoundError:
            damaged[segment.key] = GONE
    return damaged
