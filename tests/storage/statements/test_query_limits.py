"""Limits of a query, and the messages for queries beyond them."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from storage import QueryError, Store
from storage.statements import limits
from storage.statements.limits import Limits, default_memory, parse_memory, process_within
from tests.storage.recording import RecordedRun

ENDLESS = "select count(*) from range(1000000) a, range(1000000) b where a.range * b.range % 7 = 3"
SMALL = Limits(memory_bytes=100_000_000)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    run = RecordedRun(tmp_path / "home", "sums-1")
    run.start(1)
    run.steps(1, 2)
    return tmp_path / "home"


@pytest.fixture
def scratch(home: Path) -> Iterator[Path]:
    """The directory for temporary files, which is empty again at the end."""
    yield home / "tmp"
    assert not list((home / "tmp").iterdir())


def test_a_query_is_stopped_at_its_time_limit_and_the_snapshot_stays(home: Path) -> None:
    with Store.open(home, Limits(seconds=0.3)) as store:
        RecordedRun(home, "sums-2").start(1)
        before = store.query("select count(*) from runs").rows
        with pytest.raises(
            QueryError, match=r"stopped after 0\.3 seconds, its time limit\n  hint: `--timeout SECONDS`"
        ):
            store.query(ENDLESS)
        RecordedRun(home, "sums-3").start(1)
        assert store.query("select count(*) from runs").rows == before


def test_the_time_limit_is_of_all_batches_together(home: Path) -> None:
    rows = "select sum(a.range * b.range % 7) from range(100000) a, range(100000) b group by b.range % 2"
    with (
        Store.open(home, Limits(seconds=0.5)) as store,
        pytest.raises(QueryError, match="time limit"),
        store.stream(f"from range(1000000) union all by name {rows}") as answer,
    ):
        for _ in answer.rows():
            pass


@pytest.mark.more
def test_a_call_that_does_not_stop_is_left_alone_and_the_store_goes_on(home: Path) -> None:
    with Store.open(home, Limits(seconds=0.2)) as store:
        began = time.monotonic()
        with pytest.raises(QueryError, match="time limit"):
            store.query("select levenshtein(repeat('a', 35000), repeat('b', 35000))")
        assert time.monotonic() - began < 4
        assert store.query("select count(*) from runs").rows == [(1,)]
    # Until it has ended, a command that is called in this process ends the process.
    wait_for(lambda: all(answer.done() for answer in limits._stuck), timeout=120, what="the end of the call")


def test_ctrl_c_while_a_query_begins_stops_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        begin(thread)
        raise KeyboardInterrupt

    with Store.open(home) as store:
        threads = set(threading.enumerate())
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.query(ENDLESS)
        assert set(threading.enumerate()) <= threads  # one that computes while the process ends would abort it
        assert store.query("select 1 as a").rows == [(1,)]


def test_the_time_that_others_take_does_not_count(home: Path) -> None:
    # Seconds, for work of a tenth of one: a machine that others use may take the cores away for long.
    with Store.open(home, Limits(seconds=3)) as store, store.stream("from range(200000)") as answer:
        time.sleep(3.1)
        assert sum(len(rows) for rows in answer.rows()) == 200_000


@pytest.mark.usefixtures("scratch")
def test_what_cannot_go_to_disk_stops_at_the_memory_limit(home: Path) -> None:
    with Store.open(home, SMALL) as store:
        with pytest.raises(QueryError, match="needs more than 95 MiB, the memory limit\n  hint: `--memory SIZE`"):
            store.query("select list(range) from range(100000000)")
        with pytest.raises(QueryError, match="the answer needs more than 95 MiB"):
            store.query("select repeat('a', 1000) from range(200000)")
        assert store.query("select 1").rows == [(1,)]


def test_a_stream_holds_no_more_than_a_batch(home: Path) -> None:
    with Store.open(home, SMALL) as store, store.stream("select repeat('a', 1000) from range(200000)") as answer:
        assert sum(len(rows) for rows in answer.rows()) == 200_000


@pytest.mark.more
def test_what_does_not_fit_goes_to_a_directory_that_is_removed(home: Path, scratch: Path) -> None:
    with Store.open(home, Limits(memory_bytes=40_000_000)) as store:
        with store.stream("select range, hash(range) as h from range(4000000) order by h") as answer:
            next(answer.rows())
            (directory,) = (path for path in scratch.iterdir() if path.is_dir())
            assert directory.stat().st_mode & 0o777 == 0o700
            assert list(directory.iterdir())
        assert not list(home.rglob("*.tmp"))


KILLED = """
import sys
from pathlib import Path
from storage import Store
from storage.statements.limits import Limits
with Store.open(Path(sys.argv[1]), Limits(memory_bytes=40_000_000)) as store:
    with store.stream("select range, hash(range) as h from range(4000000) order by h") as answer:
        next(answer.rows())
        print("\\nspilled", flush=True)  # after DuckDB's progress bar
        sys.stdin.read()
"""


@pytest.mark.more
def test_what_a_killed_query_had_put_on_disk_is_removed_by_the_next_one(home: Path, scratch: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(home)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as query:
        assert b"spilled\n" in iter(query.stdout.readline, b"")
        with Store.open(home) as store:
            store.query("select 1")
        query.kill()
    assert sum(path.stat().st_size for path in scratch.rglob("*.tmp")) > 1_000_000, "nobody else's query removes it"
    with Store.open(home) as store:
        store.query("select 1")


def test_a_process_takes_no_more_than_the_limit_for_what_duckdb_does_not_count(home: Path) -> None:
    with Store.open(home, SMALL) as store, process_within(SMALL):
        with pytest.raises(QueryError, match="the memory limit"):
            store.query("select len(range(1000000000))")
        assert store.query("select len(range(1000))").rows == [(1000,)]


def test_threads_share_a_store_that_has_a_time_limit(home: Path) -> None:
    answers: list[object] = []
    with Store.open(home, Limits(seconds=30)) as store:
        ask = lambda: answers.append(store.query("select count(*) from runs").rows)  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [[(1,)]] * 4


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("select error('.parquet')", "Invalid Input Error: .parquet"),
        ("select 'see x.parquet'::int", "Conversion Error: Could not convert string 'see x.parquet'"),
        ("select json_extract('x.parquet', '$')", "x.parquet"),
        ("select * from 'missing.parquet'", "is not a table or view"),
    ],
)
def test_a_text_that_looks_like_a_file_is_not_taken_for_a_damaged_one(home: Path, sql: str, message: str) -> None:
    with Store.open(home) as store:
        before = store.query("select count(*) from metrics")
        with pytest.raises(QueryError) as caught:
            store.query(sql)
        assert message in str(caught.value)
        assert "db check" not in str(caught.value)
        assert store.query("select count(*) from metrics").warnings == before.warnings


@pytest.mark.parametrize(("text", "size"), [("4GiB", 2**32), ("1.5 gib", 3 * 2**29), ("500MB", 500_000_000)])
def test_a_size_of_memory_has_a_unit(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["4", "abc", "-1GB", "0GB", "25%", "4 GB; x"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(QueryError, match="write it as 4GiB or 500MB"):
        parse_memory(text)


def test_a_quarter_of_the_memory_is_the_default() -> None:
    assert 2**26 < default_memory() < 2**45
