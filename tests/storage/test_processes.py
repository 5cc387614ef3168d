"""Many processes on one home: nobody sees a row twice or misses one, and a killed ingester costs nothing."""

import multiprocessing
import random
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from storage import Store, check
from storage.database import database_path
from storage.ingest import ingest
from tests.storage import processes
from tests.storage.recording import RecordedRun

COUNTS = "SELECT name, count(*), count(DISTINCT step), max(step) FROM metrics GROUP BY name ORDER BY name"


@pytest.fixture
def spawn() -> Iterator["multiprocessing.context.ForkServerContext"]:
    """Processes that start at once, from a server that has the imports; those left at the end are killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.storage.processes"])
    yield context
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def everything_once(root: Path, steps: int) -> bool:
    """Whether each of the run's metrics is there at every step, once."""
    expected = [(name, steps, steps, steps) for name in ("entropy", "reward/mean", "reward/std")]
    return Store.open(root).query(COUNTS).rows == expected


def test_readers_and_ingesters_at_work_while_a_trainer_writes(
    tmp_path: Path, spawn: "multiprocessing.context.ForkServerContext"
) -> None:
    steps, stop, answers = 40, tmp_path / "stop", spawn.Queue()
    ingesters = [spawn.Process(target=processes.ingest_until, args=(tmp_path, stop)) for _ in range(3)]
    readers = [spawn.Process(target=processes.read_until, args=(tmp_path, stop, answers)) for _ in range(2)]
    for process in (*ingesters, *readers):
        process.start()
    writer = spawn.Process(target=processes.write_steps, args=(tmp_path, "a-1", steps))
    writer.start()
    writer.join(120)
    time.sleep(1)
    stop.touch()
    counts = [answers.get(timeout=60) for _ in readers]
    for process in (*ingesters, *readers):
        process.join(60)
    assert all(isinstance(answer, int) and answer > 3 for answer in counts), counts
    assert [process.exitcode for process in (writer, *ingesters, *readers)] == [0] * 6
    ingest(tmp_path)
    assert everything_once(tmp_path, steps)
    assert check(tmp_path) == []


@pytest.mark.parametrize("rounds", [8, pytest.param(100, marks=pytest.mark.long)])
def test_an_ingester_killed_at_any_moment_loses_and_doubles_nothing(
    tmp_path: Path, spawn: "multiprocessing.context.ForkServerContext", rounds: int
) -> None:
    draws = random.Random(0)
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    step = 0
    for _ in range(rounds):
        started = spawn.Queue()
        ingester = spawn.Process(target=processes.ingest_forever, args=(tmp_path, started))
        ingester.start()
        started.get(timeout=60)
        end = time.monotonic() + draws.uniform(0, 0.4)
        while time.monotonic() < end or step == 0:
            step += 1
            run.steps(step, step)
        ingester.kill()
        ingester.join()
        assert everything_once(tmp_path, step)
        assert check(tmp_path) == []
    ingest(tmp_path)
    for _ in range(2):
        ingest(tmp_path, compact="a-1", whole=True, keep_seconds=0.0)
    assert len(list((run.path / "segments/metrics").glob("*.parquet"))) == 1
    with duckdb.connect(str(database_path(tmp_path)), read_only=True) as database:
        assert database.execute("SELECT count(*) FROM recorded.metrics").fetchone() == (3 * step,)
    assert everything_once(tmp_path, step)
    assert check(tmp_path) == []


def test_a_reader_goes_on_reading_the_file_that_an_ingest_replaced(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 3)
    ingest(tmp_path)
    with duckdb.connect(str(database_path(tmp_path)), read_only=True) as reader:
        run.steps(4, 4)
        ingest(tmp_path)
        assert reader.execute("SELECT max(step) FROM recorded.metrics").fetchone() == (3,)
    assert everything_once(tmp_path, 4)


def test_an_open_store_keeps_no_ingester_waiting(
    tmp_path: Path, spawn: "multiprocessing.context.ForkServerContext"
) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 3)
    ingest(tmp_path)
    with Store.open(tmp_path) as store:
        before = store.query(COUNTS).rows
        run.steps(4, 4)
        ingester = spawn.Process(target=ingest, args=(tmp_path,))
        ingester.start()
        ingester.join(60)
        assert ingester.exitcode == 0
        with duckdb.connect(str(database_path(tmp_path)), read_only=True) as database:
            assert database.execute("SELECT max(step) FROM recorded.metrics").fetchone() == (4,)
        assert store.query(COUNTS).rows == before
    assert everything_once(tmp_path, 4)


def test_an_ingest_on_a_full_disk_fails_and_leaves_the_database_as_it_was(
    tmp_path: Path, spawn: "multiprocessing.context.ForkServerContext"
) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 2)
    ingest(tmp_path)
    before = database_path(tmp_path).read_bytes()
    run.steps(3, 4)
    outcome = spawn.Queue()
    process = spawn.Process(target=processes.ingest_on_a_full_disk, args=(tmp_path, outcome))
    process.start()
    assert outcome.get(timeout=60) != ""
    process.join(60)
    assert database_path(tmp_path).read_bytes() == before
    assert everything_once(tmp_path, 4)
    assert ingest(tmp_path).segments == 8
    assert check(tmp_path) == []


def test_a_database_held_open_by_another_program_keeps_nobody_from_reading_or_ingesting(
    tmp_path: Path, spawn: "multiprocessing.context.ForkServerContext"
) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 2)
    ingest(tmp_path)
    held, stop = spawn.Queue(), tmp_path / "stop"
    process = spawn.Process(target=processes.hold_open, args=(database_path(tmp_path), held, stop))
    process.start()
    assert held.get(timeout=60)
    result = Store.open(tmp_path).query(COUNTS)
    assert len(result.rows) == 3
    assert "unreadable" in result.warnings[0]
    run.steps(3, 3)
    ingest(tmp_path)
    assert everything_once(tmp_path, 3)
    stop.touch()
    process.join(60)
    assert everything_once(tmp_path, 3)
    assert check(tmp_path) == []
