"""What the tests of concurrency run in processes of their own. Each function returns or is killed."""

import resource
import time
from multiprocessing.queues import Queue
from pathlib import Path

import duckdb

from storage import Store, compaction
from storage.ingest import ingest
from tests.storage.recording import RecordedRun

ROLLOUTS, TOKENS = 2, 3
SEEN = """
    SELECT count(DISTINCT step), max(step), count(*),
           (SELECT count(*) FROM tokens), (SELECT max(step) FROM tokens), (SELECT count(*) FROM events)
    FROM metrics
"""


def write_steps(root: Path, run_id: str, steps: int) -> None:
    """A trainer: one segment a table and step."""
    run = RecordedRun(root, run_id)
    run.start(1)
    for step in range(1, steps + 1):
        run.step(step, rollouts=ROLLOUTS, tokens=TOKENS)
        run.flush()


def ingest_until(root: Path, stop: Path) -> None:
    """An ingester that goes on until a file appears, merges at every fourth segment and deletes at once."""
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


def hold_open(path: Path, held: "Queue[bool]", stop: Path) -> None:
    """Another program that has the database open for writing until a file appears."""
    with duckdb.connect(str(path)):
        held.put(True)
        while not stop.exists():
            time.sleep(0.05)


def ingest_forever(root: Path, started: "Queue[float]") -> None:
    """An ingester that is there to be killed. It merges at every fourth segment and deletes at once."""
    compaction.MOST_SMALL = 4
    started.put(time.monotonic())
    while True:
        ingest(root, compact="a-1", keep_seconds=0.0)
