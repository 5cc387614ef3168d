"""Packs: the rows of many runs in one file a table, the same as in the runs' own files, whatever happens to either."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from storage import Store, check, compact, rebuild
from storage.database import create_tables, database_path
from storage.ingest import ingest
from storage.merging import packs as module
from storage.merging.compaction import compact_run
from tests.storage.recording import RecordedRun, flip

TABLES = ("metrics", "rollouts", "tokens", "evaluation_samples")
RUNS = ("sums-0", "sums-1", "sums-2", "sums-3")

Rows = dict[str, list[tuple[object, ...]]]


@pytest.fixture(autouse=True)
def few_and_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of three files, and directories whose times are trusted at once."""
    monkeypatch.setattr(module, "FEWEST", 3)
    monkeypatch.setattr("storage.units._SETTLED_NS", 0)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Runs that have ended, one with superseded rows, one with a file of earlier days; nothing is indexed or packed."""
    home = tmp_path / "home"
    for name in RUNS:
        record(home, name)
    (earlier,) = (home / "runs/sums-3").glob("evaluate/*/segments/evaluation_samples/*")
    pq.write_table(pq.read_table(earlier).drop_columns(["attempt", "reward_error"]), earlier)
    resumed = RecordedRun(home, "sums-resumed")
    resumed.start(1)
    resumed.steps(1, 2, reward=0.1)
    resumed.start(2, resumed_from_step=1)
    resumed.steps(2, 3, reward=0.9)
    resumed.evaluate()
    return home


def record(home: Path, name: str) -> RecordedRun:
    run = RecordedRun(home, name)
    run.start(1)
    run.steps(1, 2)
    run.evaluate()
    return run


def rows(home: Path, warning: str = "") -> Rows:
    """Returns each table, as readers see it. `warning`: text of a warning in one of the answers; empty if none
    warns."""
    with Store.open(home) as store:
        answers = {table: store.query(f"from {table} order by all") for table in TABLES}
    warned = {line for answer in answers.values() for line in answer.warnings}
    assert any(warning in line for line in warned) if warning else not warned
    return {table: answer.rows for table, answer in answers.items()}


def of_others(home: Path) -> Rows:
    """Returns the content for a program that opens the index by itself."""
    with duckdb.connect(str(database_path(home)), read_only=True) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return {table: connection.execute(f"from {table} order by all").fetchall() for table in TABLES}


def packs(home: Path) -> list[Path]:
    return sorted((home / "packs").glob("*"))


def packed_runs(home: Path) -> set[str]:
    """The runs of whose tokens a pack counts."""
    with duckdb.connect(str(database_path(home)), read_only=True) as connection:
        query = "SELECT run_id FROM recorded.segments WHERE table_name = 'tokens' AND pack IS NOT NULL"
        return {run_id for (run_id,) in connection.execute(query).fetchall()}


def without(before: Rows, run_id: str) -> Rows:
    return {table: [row for row in rows if run_id not in row] for table, rows in before.items()}


@pytest.mark.more
def test_rows_are_the_same_with_packs_and_without_and_come_from_packs_alone(home: Path) -> None:
    before = rows(home)
    assert all(before.values())
    compact(home, keep_seconds=0.0)
    assert [path.name.partition("-")[0] for path in packs(home)] == sorted(TABLES)
    assert packed_runs(home) == {*RUNS, "sums-resumed"}
    assert rows(home) == of_others(home) == before
    assert check(home, full=True) == []
    contents = {path: path.read_bytes() for path in home.glob("runs/*/segments/tokens/*")}
    for path in contents:  # in place: no directory changes its time
        path.write_bytes(b"")
    assert rows(home)["tokens"] == before["tokens"], "what is packed is read from packs"
    shutil.rmtree(home / "packs")
    for path, content in contents.items():
        path.write_bytes(content)
    assert rows(home) == before
    assert len(check(home)) == len(TABLES)
    rebuild(home)
    assert rows(home) == of_others(home) == before
    assert check(home, full=True) == []


@pytest.mark.more
def test_a_run_that_was_deleted_is_in_no_answer_and_its_pack_goes(home: Path) -> None:
    compact(home, keep_seconds=0.0)
    before, first = rows(home), packs(home)
    with Store.open(home) as reader:
        reader.query("select 1")
        shutil.rmtree(home / "runs/sums-1")
        assert rows(home) == without(before, "sums-1")
        ingest(home)
        assert rows(home) == of_others(home) == without(before, "sums-1")
        assert not packed_runs(home)
        assert reader.query("from tokens order by all").rows == before["tokens"], "an earlier moment keeps its packs"
    assert packs(home) == first
    record(home, "sums-5")
    ingest(home, compact="sums-5", whole=True, keep_seconds=0.0)
    assert not {*packs(home)} & {*first}
    assert packed_runs(home) == {*RUNS, "sums-resumed", "sums-5"} - {"sums-1"}


@pytest.mark.more
def test_a_run_that_goes_on_or_is_evaluated_again_shows_its_new_rows_once(home: Path) -> None:
    compact(home, keep_seconds=0.0)
    run = RecordedRun(home, "sums-0")
    run.start(2, resumed_from_step=1)
    run.steps(2, 3, reward=0.9)
    run.evaluate("f" * 64, accuracy=0.9)
    for name in ("sums-2", "sums-3"):
        (home / "runs" / name / "report.html").touch()
    before = rows(home)
    assert {row[1] for row in before["metrics"] if row[0] == "sums-0"} == {1, 2, 3}
    assert len([row for row in before["evaluation_samples"] if row[0] == "sums-0"]) == 1
    ingest(home)
    assert packed_runs(home) == {*RUNS, "sums-resumed"}, "no segment has changed"
    assert rows(home) == of_others(home) == before
    compact(home, keep_seconds=0.0)
    assert packed_runs(home) == {*RUNS, "sums-resumed"} - {"sums-0"}
    assert rows(home) == of_others(home) == before
    for name in ("sums-1", "sums-2"):  # freed, so that half of the pack counts no more
        shutil.rmtree(home / "runs" / name / "segments/tokens")
        (home / "runs" / name / "freed.json").write_text('{"tokens": {"freed_at": "2026-11-22", "keep_days": 1}}')
    before = rows(home)
    ingest(home)
    assert rows(home) == of_others(home) == before
    ingest(home, compact="sums-3", whole=True, keep_seconds=0.0)
    assert packed_runs(home) == {"sums-0", "sums-3", "sums-resumed"}
    assert rows(home) == of_others(home) == before


def test_packs_grow_so_that_a_row_is_written_again_a_few_times() -> None:
    written, most = 0, 0
    with duckdb.connect() as index:
        create_tables(index, "recorded")
        for number in range(120):
            index.execute(
                f"INSERT INTO recorded.units VALUES ('runs/{number}', '1', false, NULL);"
                " INSERT INTO recorded.segments"
                f" VALUES ('{number}', 'tokens', '{number}', 1000, 0, 9, true, NULL, NULL)"
            )
            for members in module._to_pack(index, "tokens"):
                written += len(members)
                keys = [entry.segment.key for entry in members]
                index.execute(f"UPDATE recorded.segments SET pack = '{number}' WHERE key IN {(*keys,)}")
            loose = "count(*) FILTER (pack IS NULL) < 3"
            query = f"SELECT count(DISTINCT pack), {loose} FROM recorded.segments"
            ((num_packs, few_loose),) = index.execute(query).fetchall()
            assert few_loose
            most = max(most, num_packs)
    assert 2 <= most <= 6
    assert written <= 120 * 6


@pytest.mark.long
def test_packs_are_cut_at_a_size_between_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rows(home)
    monkeypatch.setattr(module, "LARGEST_BYTES", 1)
    compact(home, keep_seconds=0.0)
    assert len(packs(home)) == len(TABLES) * 5
    assert rows(home) == of_others(home) == before
    monkeypatch.setattr(module, "SMALL_BYTES", 1)
    rebuild(home)
    assert packed_runs(home) == set()
    assert rows(home) == of_others(home) == before


@pytest.mark.more
@pytest.mark.parametrize("place", [-2, *(pytest.param(place, marks=pytest.mark.long) for place in (2, 60))])
def test_a_damaged_pack_is_left_out_and_named_and_nothing_is_missing(home: Path, place: int) -> None:
    before = rows(home)
    compact(home, keep_seconds=0.0)
    (pack,) = (path for path in packs(home) if path.name.startswith("tokens"))
    flip(pack, place)
    named = f"packs/{pack.name}: damaged"
    assert [line.startswith(named) for line in check(home, full=True)] == [True]
    if place == -2:  # its footer cannot be read: a query finds out
        assert rows(home, warning=named) == before
    rebuild(home)
    assert rows(home) == before
    assert check(home, full=True) == []


def test_a_damaged_file_of_a_run_comes_into_no_pack(home: Path) -> None:
    ingest(home, compact="sums-2", keep_seconds=0.0)
    compact_run(home, "sums-2", whole=True, keep_seconds=0.0)
    (path,) = (home / "runs/sums-2/segments/tokens").glob("c*")
    flip(path, 60)
    compact(home, keep_seconds=0.0)
    assert packed_runs(home) == {*RUNS, "sums-resumed"} - {"sums-2"}


@pytest.mark.long
def test_a_copied_home_and_one_that_cannot_be_written_answer_as_before(home: Path, tmp_path: Path) -> None:
    compact(home, keep_seconds=0.0)
    before = rows(home)
    copied = Path(shutil.copytree(home, tmp_path / "copied"))
    assert rows(copied) == before
    ingest(copied)
    assert packed_runs(copied) == {*RUNS, "sums-resumed"}, "known by the digests in the files' names"
    assert rows(copied) == of_others(copied) == before
    database_path(home).unlink()
    assert rows(home) == before, "without the index its packs count for nothing"
    ingest(home, keep_seconds=0.0)
    assert not packs(home)


@pytest.mark.long
@pytest.mark.parametrize("after", range(1, 12))
def test_an_ingest_killed_while_it_packs_loses_and_doubles_nothing(home: Path, after: int) -> None:
    compact(home, keep_seconds=0.0)
    for number in range(5, 9):
        record(home, f"sums-{number}")
    before = rows(home)
    code = (
        "import os, sys\n"
        "calls = 0\n"
        "def hook(event, arguments):\n"
        "    global calls\n"
        "    if event in ('os.rename', 'os.remove', 'os.utime') and any('packs' in str(a) or 'duckdb' in str(a)"
        " for a in arguments):\n"
        "        calls += 1\n"
        f"        if calls > {after}: os._exit(9)\n"
        "sys.addaudithook(hook)\n"
        "from storage import compact, units\n"
        "from storage.merging import packs\n"
        "packs.FEWEST, units._SETTLED_NS = 3, 0\n"
        "from pathlib import Path\n"
        "compact(Path(sys.argv[1]), keep_seconds=0.0)\n"
        "os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(home)], check=False).returncode == 9
    assert rows(home) == before
    compact(home, keep_seconds=0.0)
    assert rows(home) == of_others(home) == before
    assert not [path for path in packs(home) if path.name.endswith(".partial")]
    assert check(home, full=True) == []


@pytest.mark.long
def test_a_reader_of_an_earlier_moment_keeps_its_packs_for_a_while(home: Path) -> None:
    compact(home, keep_seconds=0.0)
    before = rows(home)
    with Store.open(home) as reader:
        reader.query("select 1")
        for number in range(5, 12):
            record(home, f"sums-{number}")
        compact(home)
        assert reader.query("from tokens order by all").rows == before["tokens"]
        assert len(packs(home)) > len(TABLES)
        old = {path for path in packs(home) if path.stat().st_mtime < os.stat(database_path(home)).st_mtime - 600}
        assert not old
    compact(home, keep_seconds=0.0)
    assert len(packs(home)) == len(TABLES)
