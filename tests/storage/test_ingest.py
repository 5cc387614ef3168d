"""What ends up in the database, and what a query sees of runs that were resumed, damaged, moved or removed."""

import errno
import os
import random
import re
import shutil
import zlib
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_bombs import Column, write

from storage import Store, check, rebuild, units
from storage.contents import read_merged
from storage.database import connect, database_path, working_path
from storage.ingest import ingest
from tests.storage.recording import RecordedRun, rewritten, segment, write_json

STEPS = "select step, value from metrics where name = 'reward/mean' order by all"
TABLES = (
    "metrics",
    "rollouts",
    "tokens",
    "events",
    "checkpoints",
    "evaluations",
    "evaluation_samples",
    "runs",
    "stages",
)


def seen(home: Path, query: str = STEPS) -> list[tuple[object, ...]]:
    """The answer, which must be the same from segments alone, half ingested and ingested."""
    with Store.open(home) as store:
        fresh = store.query(query).rows
        for change in (ingest, rebuild):
            change(home)
            assert store.query(query).rows == fresh
            store.refresh()
            assert store.query(query).rows == fresh
    return fresh


def test_each_segment_is_loaded_once(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 5)
    first, second = ingest(tmp_path), ingest(tmp_path)
    assert (first.segments, first.removed, first.skipped) == (20, 0, ())
    assert second.segments == 0
    run.steps(6, 6)
    assert ingest(tmp_path).segments == 4
    assert seen(tmp_path) == [(step, 0.5) for step in range(1, 7)]


@pytest.mark.more
def test_a_resumed_attempt_supersedes_what_was_recorded_after_its_checkpoint(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 6, each=4, reward=0.1)  # one segment reaches over the checkpoint
    ingest(tmp_path)
    run.start(2, resumed_from_step=3)
    assert Store.open(tmp_path).query(STEPS).rows == [(1, 0.1), (2, 0.1), (3, 0.1)]
    run.steps(4, 5, reward=0.2)
    expected = [(1, 0.1), (2, 0.1), (3, 0.1), (4, 0.2), (5, 0.2)]
    assert seen(tmp_path) == expected
    tokens = "select step, count(*) from tokens group by step order by step"
    assert seen(tmp_path, tokens) == [(step, 6) for step in range(1, 6)]
    run.start(3, resumed_from_step=0)
    assert seen(tmp_path) == []


@pytest.mark.more
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_count_are_those_of_the_definition(tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)
    run = RecordedRun(tmp_path, "a-1")
    resumed, recorded, reached = {}, [], 0
    for attempt in range(1, 6):
        resumed[attempt] = draws.randint(0, reached)
        run.start(attempt, resumed_from_step=resumed[attempt])
        reached = resumed[attempt] + draws.randint(1, 5)
        run.steps(resumed[attempt] + 1, reached, each=draws.randint(1, 3), reward=float(attempt))
        recorded += [(step, attempt) for step in range(resumed[attempt] + 1, reached + 1)]
        if draws.random() < 0.5:
            ingest(tmp_path)
    valid = [
        (step, float(attempt))
        for step, attempt in recorded
        if all(step <= resumed[later] for later in resumed if later > attempt)
    ]
    assert seen(tmp_path) == sorted(valid)
    assert [step for step, _ in sorted(valid)] == list(range(1, reached + 1))


def test_every_roll_back_stays_on_record_however_far_a_later_one_goes(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 6)
    for attempt, back_to in ((2, 4), (3, 2), (4, 0)):
        run.start(attempt, resumed_from_step=back_to)
        run.writer.event(back_to, "rolled_back", f"back to step {back_to}")
        run.steps(back_to + 1, back_to + 2)
    gone_back = "select step from events where kind = 'rolled_back' order by step"
    assert seen(tmp_path, gone_back) == [(0,), (2,), (4,)]
    assert seen(tmp_path, "select step from events where kind = 'stepped' order by step") == [(1,), (2,)]


def test_an_evaluation_on_the_way_counts_once_the_last_one_of_its_step(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "r1")
    run.start(1)
    run.evaluate_on_the_way(2, 0.2)
    run.evaluate_on_the_way(4, 0.4)
    run.evaluate_on_the_way(6, 0.6)
    run.start(2, resumed_from_step=4)
    run.evaluate_on_the_way(4, 0.45)
    run.evaluate_on_the_way(8, 0.8)
    run.evaluate_on_the_way(10, 0.9)
    run.evaluate_on_the_way(12, 0.1, fingerprint="b" * 64)
    run.evaluate(accuracy=0.7)
    for _ in range(2):
        with Store.open(tmp_path) as store:
            measured = store.query("select step, value from evaluations order by step").rows
            samples = store.query("select step, response from evaluation_samples order by step").rows
        assert [step for step, _ in measured] == [0, 2, 4, 8, 10], "step 6 is superseded, step 12 of other settings"
        assert [value for _, value in measured] == pytest.approx([0.4, 0.2, 0.45, 0.8, 0.7])
        assert samples == [(2, "0.2"), (4, "0.45"), (8, "0.8"), (10, "2")]
        ingest(tmp_path)


def test_an_attempt_that_began_after_the_run_was_taken_over_from_it_counts_for_nothing(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "r1")
    run.start(1, lease=1)
    run.steps(1, 6)
    run.start(2, resumed_from_step=4, lease=2)
    run.steps(5, 7)
    late = RecordedRun(tmp_path, "r1")
    late.start(3, resumed_from_step=2, lease=1)
    for step in (3, 8):
        late.step(step, reward=-1.0)
    late.writer.flush()
    run.start(4, resumed_from_step=7)  # a batch job, which works under no lease
    run.steps(8, 8)
    rewards = "select step, count(*), min(value) from metrics where name = 'reward/mean' group by step order by step"
    assert seen(tmp_path, rewards) == [(step, 1, 0.5) for step in range(1, 9)]


@pytest.mark.more
def test_another_run_s_attempts_supersede_nothing(tmp_path: Path) -> None:
    for name in ("a-1", "a-2"):
        run = RecordedRun(tmp_path, name)
        run.start(1)
        run.steps(1, 3)
    run.start(2, resumed_from_step=1)
    counts = "select run_id, count(*) from rollouts group by run_id order by run_id"
    assert seen(tmp_path, counts) == [("a-1", 6), ("a-2", 2)]


@pytest.mark.more
def test_more_runs_than_are_read_at_once_are_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.ingest._UNITS_AT_ONCE", 1)
    for name in ("a-1", "b-1", "c-1"):
        run = RecordedRun(tmp_path, name)
        run.start(1)
        run.steps(1, 5)
    assert len(seen(tmp_path)) == 15
    assert seen(tmp_path, "select count(reward_last) from run_summary") == [(3,)]


@pytest.mark.more
def test_a_disk_that_takes_no_merged_file_costs_no_row_and_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 5)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("storage.merging.compaction.write_merged", refuse)
        assert ingest(tmp_path, compact="a-1", whole=True).merged == 0
    assert "the files of a-1 are intact, but cannot be merged: [Errno 28] No space left on device" in caplog.text
    assert len(seen(tmp_path)) == 5
    assert ingest(tmp_path, compact="a-1", whole=True).merged > 0


def test_rebuilding_gives_the_same(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 6, each=2)
    ingest(tmp_path)
    run.start(2, resumed_from_step=4)
    run.steps(5, 7)
    run.checkpoint(7)
    run.evaluate()
    ingest(tmp_path)
    store = Store.open(tmp_path)
    before = {name: store.query(f"from {name} order by all").rows for name in TABLES}
    database_path(tmp_path).unlink()
    rebuild(tmp_path)
    store.refresh()
    assert {name: store.query(f"from {name} order by all").rows for name in TABLES} == before
    assert all(before.values())
    assert check(tmp_path) == []


def test_a_truncated_segment_is_skipped_and_said_so(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 3)
    names = []
    for table in ("metrics", "tokens"):
        broken = segment(run, table, 2)
        broken.write_bytes(broken.read_bytes()[:-40])
        names.append(broken.relative_to(tmp_path))
    result = Store.open(tmp_path).query("select distinct step from metrics order by step")
    assert result.rows == [(1,), (3,)]
    assert [warning.partition(": not a whole Parquet file")[0] for warning in result.warnings] == [
        f"skipped {name}" for name in names
    ]
    done = ingest(tmp_path)
    assert (done.segments, len(done.skipped)) == (10, 2)
    assert Store.open(tmp_path).query("from metrics").warnings == result.warnings
    assert seen(tmp_path, "select distinct step from tokens order by step") == [(1,), (3,)]
    assert len(check(tmp_path)) == 2


@pytest.mark.parametrize("place", [0, 25])  # in a page's header, in its data
def test_damage_between_whole_footers_is_found_when_it_is_read(tmp_path: Path, place: int) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 2)
    ingest(tmp_path)
    broken = segment(run, "tokens", 1)
    entropy = pq.read_metadata(broken).row_group(0).column(12).data_page_offset
    with open(broken, "r+b") as file:
        file.seek(entropy + place)
        file.write(b"\xff" * 16)
    assert f"tokens/{broken.name}: damaged" in check(tmp_path)[0]
    result = Store.open(tmp_path).query("select sum(entropy), sum(token_id) from tokens")
    assert result.rows == [(6.0, 15)]
    assert f"tokens/{broken.name}: damaged" in result.warnings[0]


@pytest.mark.more
def test_foreign_files_are_skipped(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 1)
    other = RecordedRun(tmp_path, "a-2")
    other.start(1)
    other.steps(1, 2)
    metrics, name = run.path / "segments" / "metrics", "a0001-s{0:06}-{0:06}-0123456789abcdef.parquet"
    shutil.copy(segment(other, "metrics", 2), metrics / name.format(2))
    pq.write_table(pa.table({"x": [1]}), metrics / name.format(3))
    pq.write_table(
        pa.table({"run_id": ["a-1"], "step": [4], "name": [1.5]}),
        metrics / name.format(4),
    )
    (metrics / "notes.txt").write_text("hello")
    assert seen(tmp_path, "select step from metrics where run_id = 'a-1' group by step") == [(1,)]
    assert check(tmp_path) == [
        "runs/a-1/segments/metrics/notes.txt: not a valid segment name; ignored",
        f"runs/a-1/segments/metrics/{name.format(2)}: foreign: it has rows of run `a-2`",
        f"runs/a-1/segments/metrics/{name.format(3)}: foreign: it has no column `run_id`",
        f"runs/a-1/segments/metrics/{name.format(4)}: foreign: column `name` is double, expected string",
    ]


@pytest.mark.more
@pytest.mark.parametrize("table", ["metrics", "tokens"])
def test_a_segment_of_an_older_schema_has_nulls_in_the_columns_that_came_later(tmp_path: Path, table: str) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 2)
    path = segment(run, table, 1)
    column = {"metrics": "recorded_at", "tokens": "entropy"}[table]
    old = pq.read_table(path).drop_columns([column]).append_column("forgotten", pa.nulls(6 if table == "tokens" else 3))
    old = old.set_column(old.column_names.index("step"), "step", old.column("step").cast(pa.int64()))
    rewritten(path, old)
    query = f"select step, count(*), count({column}) from {table} group by step order by step"
    size = len(old)
    assert seen(tmp_path, query) == [(1, size, 0), (2, size, size)]


def test_a_database_of_another_version_is_made_again(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 3)
    ingest(tmp_path)
    with connect(database_path(tmp_path)) as connection:
        connection.execute("update recorded.version set version = '0-old'")
    result = Store.open(tmp_path).query(STEPS)
    assert len(result.rows) == 3
    assert "of schema version 0-old" in result.warnings[0]
    assert "of schema version 0-old" in check(tmp_path)[0]
    assert ingest(tmp_path).segments == 12
    assert Store.open(tmp_path).query(STEPS).warnings == ()


@pytest.mark.more
@pytest.mark.parametrize("content", [b"", b"not a database", b"\x00" * 5000])
def test_a_database_that_is_none_is_made_again(tmp_path: Path, content: bytes) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 3)
    database_path(tmp_path).write_bytes(content)
    assert len(Store.open(tmp_path).query(STEPS).rows) == 3
    assert ingest(tmp_path).segments == 12
    assert check(tmp_path) == []
    assert len(seen(tmp_path)) == 3


def test_what_a_killed_ingest_left_does_not_matter(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 3)
    working_path(tmp_path).write_bytes(b"half of something")
    working_path(tmp_path).with_name(working_path(tmp_path).name + ".wal").write_bytes(b"and its log")
    assert len(seen(tmp_path)) == 3
    assert not working_path(tmp_path).exists()


@pytest.mark.more
def test_a_run_that_was_removed_is_forgotten_and_one_made_again_is_read_anew(tmp_path: Path) -> None:
    for name in ("a-1", "a-2"):
        run = RecordedRun(tmp_path, name)
        run.start(1)
        run.steps(1, 2, reward=0.1)
    ingest(tmp_path)
    shutil.rmtree(run.path)
    counts = (
        "select run_id, count(*), max(value) from metrics where name = 'reward/mean' group by run_id order by run_id"
    )
    assert Store.open(tmp_path).query(counts).rows == [("a-1", 2, 0.1)]
    run = RecordedRun(tmp_path, "a-2")
    run.start(1)
    run.steps(1, 2, reward=0.9)
    assert seen(tmp_path, counts) == [("a-1", 2, 0.1), ("a-2", 2, 0.9)]
    assert check(tmp_path) == []


@pytest.mark.more
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    for step, seconds in enumerate((4e9, 0.0, 2e9, 1e9), start=1):
        run.steps(step, step)
        path = segment(run, "metrics", step)
        os.utime(path, (seconds, seconds))
        ingest(tmp_path)
    assert seen(tmp_path) == [(step, 0.5) for step in range(1, 5)]
    assert ingest(tmp_path).segments == 0


def test_files_being_written_aside_are_not_there_yet(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 1)
    (run.path / "segments/metrics/.a0001-s000002-000002.parquet.partial").write_bytes(b"PAR1")
    shutil.copytree(run.path / "segments", run.path / "evaluate" / ".e0.123" / "segments")
    assert seen(tmp_path) == [(1, 0.5)]
    assert check(tmp_path) == []


@pytest.mark.more
def test_the_file_alone_answers_other_programs(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "it's-1", seed=3)
    run.start(1)
    run.steps(1, 6)
    run.start(2, resumed_from_step=4)
    run.steps(5, 5, reward=0.7)
    run.evaluate()
    ingest(tmp_path, compact="it's-1", whole=True)
    with Store.open(tmp_path) as store, duckdb.connect(str(database_path(tmp_path)), read_only=True) as program:
        names = [row[0] for row in store.query("show tables").rows]
        assert [row[0] for row in program.execute("show tables").fetchall()] == names
        for name in names:
            rows = store.query(f"from {name} order by all").rows
            assert len(program.execute(f"from {name} order by all").fetchall()) == len(rows)
        assert program.execute(STEPS).fetchall() == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5), (5, 0.7)]
        frame = program.execute("select run, step, reward from learning_curves").df()
    assert list(frame["reward"]) == [0.5, 0.5, 0.5, 0.5, 0.7]


@pytest.mark.more
def test_runs_that_have_ended_and_are_as_they_were_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        run = RecordedRun(tmp_path, f"a-{number}")
        run.start(1)
        run.steps(1, 2)
        age(run.path)
    age(run.path / "attempts", run.path / "segments", *run.path.glob("segments/*"))
    ingest(tmp_path)
    looked: list[str] = []
    read = units.read_unit
    monkeypatch.setattr(units, "read_unit", lambda root, unit, *rest: (looked.append(unit), read(root, unit, *rest))[1])
    for query in ("select 1", STEPS):
        with Store.open(tmp_path) as store:
            store.query(query)
    assert looked == ["runs/a-0", "runs/a-1"] * 2, "what changed in the last seconds may change again unnoticed"
    for number in range(2):
        there = tmp_path / f"runs/a-{number}"
        age(there / "attempts", there / "segments", *there.glob("segments/*"))
    ingest(tmp_path)
    looked.clear()
    assert len(Store.open(tmp_path).query(STEPS).rows) == 6
    assert looked == []
    run.state["status"] = "failed"
    run.save()
    assert Store.open(tmp_path).query("select status from runs order by run_id").rows[-1] == ("failed",)
    assert looked == ["runs/a-2"]


def age(*directories: Path) -> None:
    """Sets the times of these directories back by an hour."""
    for directory in directories:
        hour_ago = directory.stat().st_mtime - 3600
        os.utime(directory, (hour_ago, hour_ago))


@pytest.mark.more
@pytest.mark.parametrize("view", ["metrics", "rollouts", "tokens", "evaluation_samples", "learning_curves"])
def test_a_query_of_one_run_opens_that_run_s_files_alone(tmp_path: Path, view: str) -> None:
    for number in range(4):
        run = RecordedRun(tmp_path, f"a-{number}")
        run.start(1)
        run.steps(1, 2, each=2)
        run.evaluate()
    ingest(tmp_path)
    with Store.open(tmp_path) as store:
        query = f"explain analyze from {view} where run_id = 'a-2'"
        ((_, plan),) = store.query(query).rows
    assert re.findall(r"Scanning Files: (\S+)", plan) == ["1/4"]


@pytest.mark.more
def test_a_run_without_documents_is_still_read(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 2)
    (run.path / "run.json").unlink()
    (run.path / "state.json").write_text('{"status": "runn')
    assert len(seen(tmp_path)) == 2
    assert seen(tmp_path, "select run_id, status, seed from runs") == [("a-1", "pending", None)]
    assert [line.partition(":")[0] for line in check(tmp_path)] == ["runs/a-1/run.json", "runs/a-1/state.json"]


def test_an_unreadable_attempt_is_reported(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    write_json(run.path / "attempts" / "0002.json", {})
    assert "does not name the step it resumed from" in check(tmp_path)[0]


@pytest.mark.more
@pytest.mark.parametrize("table", ["metrics", "tokens", "events"])
def test_a_segment_that_claims_more_rows_than_its_size_holds_is_skipped(tmp_path: Path, table: str) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 1)
    rows, file = 67_000_000, run.path / "segments" / table / "a0001-s000002-000002-0123456789abcdef.parquet"
    file.parent.mkdir(exist_ok=True)
    write(file, Column("run_id", b"a-1", rows), Column("step", 2, rows), rows=rows)
    assert seen(tmp_path, "select distinct step from metrics") == [(1,)]
    found = f"{file.relative_to(tmp_path)}: foreign: {2 * rows} values in a file of {file.stat().st_size} bytes"
    assert found in check(tmp_path)[0]


@pytest.mark.more
def test_the_list_of_a_compacted_segment_does_not_unfold_without_bound() -> None:
    with pytest.raises(ValueError, match="Invalid control character"):
        read_merged(zlib.compress(b'["' + bytes(200 << 20) + b'"]'))
