"""Many processes on one home: no reader sees a row twice or misses one, and a killed ingester costs nothing."""

import contextlib
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Collection, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import duckdb
import psutil
import pytest

from storage import Store, check, rebuild
from storage.database import database_path
from storage.ingest import ingest
from tests.storage import processes
from tests.storage.recording import RecordedRun

COUNTS = "SELECT name, count(*), count(DISTINCT step), max(step) FROM metrics GROUP BY name ORDER BY name"
KEYS = {
    "metrics": ("step, name", 3),
    "rollouts": ("step, rollout_id", processes.ROLLOUTS),
    "tokens": ("step, rollout_id, position", processes.ROLLOUTS * processes.TOKENS),
    "events": ("step, kind", 1),
}
"""Table -> what no two rows share, and its rows of a step."""
WORK = {"trainer": processes.train_on, "ingester": processes.ingest_on, "compactor": processes.compact_on}


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


@pytest.mark.more
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


@pytest.mark.more
@pytest.mark.parametrize("kills", [9, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_a_trainer_an_ingester_and_a_compactor_killed_at_any_moment_lose_and_double_nothing(
    tmp_path: Path, spawn: "multiprocessing.context.ForkServerContext", kills: int
) -> None:
    draws, attempts = random.Random(0), itertools.count(1)
    recorded = spawn.Value("q", 0, lock=False)

    def start(who: str) -> BaseProcess:
        more = (next(attempts), recorded) if who == "trainer" else ()
        process = spawn.Process(target=WORK[who], args=(tmp_path, "a-1", *more))
        process.start()
        return process

    at_work = {who: start(who) for who in WORK}
    while recorded.value == 0:
        time.sleep(0.01)
    for _ in range(kills):
        time.sleep(draws.uniform(0.02, 0.5))
        who = draws.choice(list(at_work))
        victim = at_work.pop(who)
        victim.kill()
        victim.join()
        with paused(at_work.values()):
            assert whole_and_once(tmp_path, recorded.value), f"after the {who} was killed"
            assert check(tmp_path) == []
        at_work[who] = start(who)
    for process in at_work.values():
        process.kill()
        process.join()
    for _ in range(2):
        ingest(tmp_path, compact="a-1", whole=True, keep_seconds=0.0)
    assert len(list((tmp_path / "runs/a-1/segments/metrics").glob("*.parquet"))) == 1
    assert whole_and_once(tmp_path, recorded.value)
    assert check(tmp_path, full=True) == []
    before = everything(tmp_path)
    database_path(tmp_path).unlink()
    rebuild(tmp_path)
    assert everything(tmp_path) == before


@contextlib.contextmanager
def paused(at_work: Collection[BaseProcess]) -> Iterator[None]:
    """Processes do nothing meanwhile, wherever they are in their work."""
    for process in at_work:
        os.kill(process.pid or 0, signal.SIGSTOP)
    while any(psutil.Process(process.pid).status() != psutil.STATUS_STOPPED for process in at_work):
        time.sleep(0.001)
    yield
    for process in at_work:
        os.kill(process.pid or 0, signal.SIGCONT)


def whole_and_once(root: Path, steps: int) -> bool:
    """Whether every table has all rows of the steps that were recorded, and none of any step twice."""
    with Store.open(root) as store:
        return all(
            store.query(f"SELECT count(*), count(DISTINCT ({key})) FROM {table} WHERE step <= {steps}").rows
            == [(rows * steps, rows * steps)]
            and store.query(f"SELECT count(*) - count(DISTINCT ({key})) FROM {table}").rows == [(0,)]
            for table, (key, rows) in KEYS.items()
        )


def everything(root: Path) -> dict[str, list[tuple[object, ...]]]:
    """The rows of all tables and views."""
    with Store.open(root) as store:
        return {name: store.query(f"FROM {name} ORDER BY ALL").rows for (name,) in store.query("SHOW TABLES").rows}


@pytest.mark.long
@pytest.mark.parametrize("queries", [6, pytest.param(300, marks=pytest.mark.timeout(3600))])
def test_eight_readers_at_low_priority_see_whole_steps_while_two_trainers_write(
    tmp_path: Path, spawn: "multiprocessing.context.ForkServerContext", queries: int
) -> None:
    ask_while_trainers_write(tmp_path, spawn, queries)


@pytest.mark.long
def test_learning_curves_take_under_half_a_second_once_the_trainers_have_ended(
    tmp_path: Path, spawn: "multiprocessing.context.ForkServerContext"
) -> None:
    ask_while_trainers_write(tmp_path, spawn, 30)
    seconds = []
    for _ in range(300):
        begun = time.process_time()  # of all threads: on a machine with nothing else to do it takes no longer
        with Store.open(tmp_path) as store:
            assert store.query("FROM learning_curves").rows
        seconds.append(time.process_time() - begun)
    assert statistics.quantiles(seconds, n=100)[98] < 0.5


def ask_while_trainers_write(root: Path, spawn: "multiprocessing.context.ForkServerContext", queries: int) -> None:
    """Two trainers, an ingester that merges their segments, and eight readers of this many queries each, all at
    once."""
    run_ids, faults = ("a-1", "a-2"), spawn.Queue()
    stop_writing, stop = root / "stop-writing", root / "stop"
    trainers = [
        spawn.Process(target=processes.train_at_a_rate, args=(root, run_id, 2.0, stop_writing)) for run_id in run_ids
    ]
    ingester = spawn.Process(target=processes.ingest_each_second, args=(root, run_ids, stop))
    readers = [
        spawn.Process(target=processes.ask_each_second, args=(root, number, queries, faults)) for number in range(8)
    ]
    for process in (*trainers, ingester, *readers):
        process.start()
    assert end_well(readers)
    stop_writing.touch()
    assert end_well(trainers)
    stop.touch()
    assert end_well([ingester])
    assert faults.empty(), faults.get()
    with Store.open(root) as store:
        for table, rows_a_step in processes.ROWS_A_STEP.items():
            for run_id, steps, newest, rows in store.query(processes.PREFIX.format(table=table)).rows:
                assert steps == newest >= queries, f"{table} of {run_id}"
                assert rows == rows_a_step * newest, f"{table} of {run_id}"
    assert check(root) == []


def end_well(at_work: Collection[BaseProcess]) -> bool:
    """Waits for processes to end. Whether none failed."""
    for process in at_work:
        process.join()
    return all(process.exitcode == 0 for process in at_work)


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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_home_that_cannot_be_written_is_read_and_checked_as_before(
    tmp_path: Path, spawn: "multiprocessing.context.ForkServerContext", is_indexed: bool
) -> None:
    for number in range(25):  # more than a reader reads by itself where it can ingest them
        run = RecordedRun(tmp_path / "made", f"a-{number}")
        run.start(1)
        run.steps(1, 2)
    if is_indexed:
        ingest(tmp_path / "made")
    with tempfile.TemporaryDirectory() as place:  # whose parents, unlike those of tmp_path, anybody may enter
        home = Path(place) / "home"
        shutil.copytree(tmp_path / "made", home)
        for path in (home, *home.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        home.parent.chmod(0o755)
        answer = spawn.Queue()
        reader = spawn.Process(target=processes.read_as_nobody, args=(home, answer))
        reader.start()
        assert answer.get(timeout=60) == [(25, 150)]
        reader.join(60)
        for path in (home, *home.rglob("*")):
            path.chmod(0o755)


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
