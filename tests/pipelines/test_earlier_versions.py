"""A home that an earlier version of the record left is read, checked and migrated. How it was made: `make.py`."""

import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from earlier_versions.make import COMMITS, HERE, NEW

from pipelines.cli import main
from specs.records import TABLES
from storage import Store, check, rebuild
from storage import ingest as ingesting
from storage.columns import NATIVE, arrow_schema
from storage.contents import inspect, merged_away, read
from storage.database import create_tables, database_path
from storage.ingest import ingest
from storage.segments import Segment, run_segments

Rows = list[dict[str, Any]]
Answers = dict[str, list[str]]


@pytest.fixture(params=COMMITS)
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home as a version left it."""
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))
    return unpacked(request.param, tmp_path)


def unpacked(commit: str, place: Path) -> Path:
    with tarfile.open(HERE / f"{commit}.tar.xz") as archive:
        archive.extractall(place, filter="data")
    settle(place)
    return place / "home"


def settle(place: Path) -> None:
    """Makes all changes older than the last seconds: what changed then is looked at again in any case."""
    for directory in place.rglob("*/"):
        os.utime(directory, (0, 0))


def test_the_version_before_that_of_today_is_here(tmp_path: Path) -> None:
    home = unpacked(COMMITS[-1], tmp_path)
    files = {path.parent.name: path for path in home.glob("runs/**/segments/*/*.parquet")}
    assert files.keys() == TABLES.keys() - {"turns"}, "which that version did not have"
    with duckdb.connect() as now, duckdb.connect(str(database_path(home)), read_only=True) as then:
        create_tables(now, "recorded")
        new = columns_of(now) ^ columns_of(then)
    for table, path in files.items():
        new |= {f"{table}.{name}" for name in {*arrow_schema(table).names} ^ {*pq.read_schema(path).names}}
    assert new == NEW, f"record a home of the version before: see {HERE.name}/make.py"


def columns_of(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """`table.column` of the tables of an index."""
    tables = "SELECT table_name FROM duckdb_tables() WHERE schema_name = 'recorded'"
    columns = f"SELECT table_name || '.' || column_name FROM duckdb_columns() WHERE table_name IN ({tables})"
    return {name for (name,) in connection.execute(f"{columns} AND schema_name = 'recorded'").fetchall()}


def answers(home: Path) -> tuple[Answers, Answers]:
    """The rows of each table and view as its own version read them, and as they are read now, in the same columns."""
    recorded: dict[str, Rows] = json.loads((home.parent / "answers.json").read_text())
    recorded.pop("metric_names", None)  # a page of the manual, which is of today
    with Store.open(home) as store:
        read = {name: store.query(f"FROM {name}").table.to_pylist() for name in recorded}
    then = {name: _texts(rows, rows) for name, rows in recorded.items()}
    now = {name: _texts(read[name], rows) for name, rows in recorded.items()}
    return then, now


def _texts(rows: Rows, like: Rows) -> list[str]:
    """Rows as texts, in an order of their own, with the columns of others."""
    names = like[0] if like else {}
    return sorted(json.dumps({name: row[name] for name in names}, default=str) for row in rows)


def rpg(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Runs a command, which must succeed."""
    monkeypatch.setattr(sys, "argv", ["rpg", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def test_every_table_has_the_rows_that_its_own_version_saw_before_and_after_it_is_migrated(home: Path) -> None:
    then, now = answers(home)
    assert {"runs", "metrics", "rollouts", "tokens", "evaluations", "events", "checkpoints"} <= then.keys()
    assert now == then
    ingest(home)
    assert answers(home) == (then, then)
    with Store.open(home) as store:
        assert store.query("FROM metrics").warnings == ()


def test_commands_list_it_check_it_rebuild_it_and_report_on_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rpg(monkeypatch, "runs", "--json")
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["experiment"], run["status"], run["step"]) == ("sums", "finished", 3)
    (line,) = check(home)
    assert line.startswith("experiments.duckdb: of schema version ")
    rpg(monkeypatch, "db", "rebuild")
    capsys.readouterr()
    assert check(home, full=True) == []
    rpg(monkeypatch, "report", run["run_id"])
    page = Path(capsys.readouterr().out.strip()).read_text()
    (accuracy,) = Store.open(home).query("SELECT accuracy_after FROM run_summary").rows[0]
    assert f"{accuracy:.3f}" in page
    with Store.open(home) as store:
        names = [name for (name,) in store.query("SHOW TABLES").rows]
        before = {name: store.query(f"FROM {name} ORDER BY ALL").rows for name in names}
        rebuild(home)
        store.refresh()
        assert {name: store.query(f"FROM {name} ORDER BY ALL").rows for name in names} == before


def test_migrating_reads_the_footer_of_each_segment_and_the_rows_of_small_tables_and_then_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []

    def noted(root: Path, segment: Segment) -> pa.Table:
        tables.append(segment.table)
        return read(root, segment)

    monkeypatch.setattr(ingesting, "read", noted)
    (run,) = (home / "runs").iterdir()
    listed = run_segments(home, run.name)
    inspect.cache_clear()
    ingest(home)
    gone = merged_away(home, listed)
    assert inspect.cache_info().misses == len(listed) - len(gone)
    assert sorted(tables) == sorted(s.table for s in listed if s.table in NATIVE and s.key not in gone)
    for _ in range(2):  # the first deletes what had been merged, and the second looks at that run again
        ingest(home, keep_seconds=0.0)
        settle(home)
    inspect.cache_clear()
    tables.clear()
    ingest(home)
    with Store.open(home) as store:
        assert store.query("SELECT count(*) FROM tokens").rows > [(0,)]
    assert (inspect.cache_info().misses, tables) == (0, [])
