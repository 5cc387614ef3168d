"""Programs that the tests of concurrency run in separate processes. Each function returns or is killed."""

import contextlib
import ctypes
import itertools
import os
import resource
import time
from collections.abc import Sequence
from multiprocessing.queues import Queue
from pathlib import Path

import duckdb

from storage import Store, check
from storage.ingest import ingest
from storage.merging import compaction
from tests.storage.recording import RecordedRun

ROLLOUTS, TOKENS = 2, 3
SEEN = """
    SELECT count(DISTINCT step), max(step), count(*),
           (SELECT count(*) FROM tokens), (SELECT max(step) FROM tokens), (SELECT count(*) FROM events)
    FROM metrics
"""
NOBODY = 65534
"""The user who owns nothing."""
BATCH, LENGTH = 16, 64
"""Responses of a step of `train_at_a_rate`, and tokens of each."""
ROWS_A_STEP = {"metrics": 3, "rollouts": BATCH, "tokens": BATCH * LENGTH, "events": 1, "learning_curves": 1}
PREFIX = "SELECT run_id, count(DISTINCT step), max(step), count(*) FROM {table} GROUP BY run_id"


def write_steps(root: Path, run_id: str, steps: int) -> None:
    """A trainer: one segment a table and step."""
    run = RecordedRun(root, run_id)
    run.start(1)
    for step in range(1, steps + 1):
        run.step(step, rollouts=ROLLOUTS, tokens=TOKENS)
        run.flush()


def ingest_until(root: Path, stop: Path) -> None:
    """An ingester that continues until a file appears, merges at every fourth segment and deletes at once."""
    compaction.MOST_SMALL = 4
    while not stop.exists():
        ingest(root, compact="a-1", keep_seconds=0.0)


def read_until(root: Path, stop: Path, answers: "Queue[str | int]") -> None:
    """A reader of one run: in every answer each table is a whole prefix of its steps, none shorter than in the answer
    before. Puts what is wrong, then the number of answers.

    A step's segments appear table after table, and are listed so: two tables may be steps apart.
    """
    last, answered = (0, 0, 0), 0
    while not stop.exists():
        (distinct, newest, metrics, tokens, newest_token, events) = Store.open(root).query(SEEN).rows[0]
        seen = (newest or 0, newest_token or 0, events)
        whole = distinct == seen[0] and metrics == 3 * seen[0] and tokens == ROLLOUTS * TOKENS * seen[1]
        if not (whole and all(now >= before for now, before in zip(seen, last, strict=True))):
            answers.put(f"{(distinct, newest, metrics, tokens, newest_token, events)} after {last}")
        last, answered = seen, answered + 1
    answers.put(answered)


def ingest_on_a_full_disk(root: Path, outcome: "Queue[str]") -> None:
    """An ingester that may write files of 4 KiB at most. Puts how it failed."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        ingest(root)
        outcome.put("")
    except Exception as error:
        outcome.put(f"{type(error).__name__}: {error}")


def read_as_nobody(root: Path, answer: "Queue[list[tuple[int, ...]] | str]") -> None:
    """A reader that may write nothing of the home: root is no longer itself."""
    # Another user may not be able to read the interpreter: import everything first.
    (root.parent / "warm").mkdir()
    check(RecordedRun(root.parent / "warm", "warm").path.parents[1])
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        with contextlib.suppress(PermissionError):
            (root / "written").touch()
            answer.put("the home can be written")
        lines = check(root)
        answer.put(Store.open(root).query("SELECT count(DISTINCT run_id), count(*) FROM metrics").rows + lines)
    except Exception as error:
        answer.put(f"{type(error).__name__}: {error}")


def hold_open(path: Path, held: "Queue[bool]", stop: Path) -> None:
    """Another program that has the database open for writing until a file appears."""
    with duckdb.connect(str(path)):
        held.put(True)
        while not stop.exists():
            time.sleep(0.05)


def train_on(root: Path, run_id: str, attempt: int, recorded: ctypes.c_longlong) -> None:
    """A trainer that is there to be killed. It continues after the last step that it reported as recorded."""
    run = RecordedRun(root, run_id)
    first = recorded.value
    run.start(attempt, resumed_from_step=first)
    for step in itertools.count(first + 1):
        run.step(step, rollouts=ROLLOUTS, tokens=TOKENS)
        run.flush()
        recorded.value = step
        time.sleep(0.01)


def ingest_on(root: Path, run_id: str) -> None:
    """An ingester that is there to be killed. It merges at every fourth segment and deletes at once."""
    compaction.MOST_SMALL = 4
    while True:
        ingest(root, compact=run_id, keep_seconds=0.0)


def compact_on(root: Path, run_id: str) -> None:
    """A compactor that is there to be killed. It merges all segments into one file per table, and deletes at once."""
    while True:
        ingest(root, compact=run_id, whole=True, keep_seconds=0.0)
        time.sleep(0.05)


def train_at_a_rate(root: Path, run_id: str, steps_a_second: float, stop: Path) -> None:
    """A trainer of this many steps per second, each of responses and tokens as many as a small batch has."""
    run = RecordedRun(root, run_id, status="running")
    run.start(1)
    begun = time.monotonic()
    for step in itertools.count(1):
        run.step(step, rollouts=BATCH, tokens=LENGTH)
        run.flush()
        if stop.exists():
            break
        time.sleep(max(0.0, begun + step / steps_a_second - time.monotonic()))
    run.state["status"] = "finished"
    run.save()


def ingest_each_second(root: Path, run_ids: Sequence[str], stop: Path) -> None:
    """The ingester of active runs. It deletes merged segments at once."""
    while not stop.exists():
        for run_id in run_ids:
            ingest(root, compact=run_id, keep_seconds=0.0)
        time.sleep(1.0)


def ask_each_second(root: Path, number: int, queries: int, faults: "Queue[str]") -> None:
    """A reader at low priority, of at most one query a second. Ends at the first that is wrong, and puts how.

    Args:
        number: an even one keeps a store and refreshes it before each query; an odd one opens a store a query.
    """
    os.nice(19)
    last: dict[tuple[str, str], int] = {}
    begun = time.monotonic()
    with Store.open(root) as kept:
        for asked in range(queries):
            table, rows_a_step = list(ROWS_A_STEP.items())[(number + asked) % len(ROWS_A_STEP)]
            kept.refresh()
            try:
                answer = (Store.open(root) if number % 2 else kept).query(PREFIX.format(table=table))
            except Exception as error:
                faults.put(f"{table}: {type(error).__name__}: {error}")
                return
            for run_id, steps, newest, rows in answer.rows:
                is_whole = steps == newest and rows == rows_a_step * newest
                if answer.warnings or not is_whole or newest < last.get((table, run_id), 0):
                    faults.put(f"{table} of {run_id}: {(steps, newest, rows)} after {last}; {answer.warnings}")
                    return
                last[table, run_id] = newest
            time.sleep(max(0.0, begun + asked + 1 - time.monotonic()))
