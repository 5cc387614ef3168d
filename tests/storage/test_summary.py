"""What `run_summary` says of a run's rewards: kept by the ingest, and never of an earlier moment than the runs."""

import os
from pathlib import Path

import pyarrow.parquet as pq

from storage import Store, rebuild
from storage.ingest import ingest
from tests.storage.recording import RecordedRun, segment

SUMMARY = "select run_id, step, reward_first, reward_last from run_summary order by run_id"


def summary(home: Path) -> list[tuple[object, ...]]:
    with Store.open(home) as store:
        return store.query(SUMMARY).rows


def settle(home: Path) -> None:
    """Makes the directories look as if nothing had changed for long, so that the index speaks for them."""
    for path in home.rglob("*"):
        if path.is_dir():
            os.utime(path, (0, 0))


def test_the_rewards_of_a_run_are_summed_up_over_its_first_and_last_ten_steps(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1")
    run.start(1)
    run.steps(1, 10, reward=0.25)
    run.steps(11, 15, reward=0.5)
    RecordedRun(tmp_path, "b-1").start(1)
    expected = [("a-1", 15, 0.25, 0.375), ("b-1", None, None, None)]  # steps 6 to 15: (5 x 0.25 + 5 x 0.5) / 10
    assert summary(tmp_path) == expected
    for make_index in (ingest, rebuild):
        make_index(tmp_path)
        assert summary(tmp_path) == expected


def test_the_summary_of_runs_that_are_ingested_reads_none_of_their_metrics(tmp_path: Path) -> None:
    for name in ("a-1", "a-2"):
        run = RecordedRun(tmp_path, name)
        run.start(1)
        run.steps(1, 2)
    settle(tmp_path)
    ingest(tmp_path)
    with Store.open(tmp_path) as store:
        plans = {view: str(store.query(f"explain from {view}").rows) for view in ("run_summary", "learning_curves")}
    assert {view: "PARQUET" in plan for view, plan in plans.items()} == {"run_summary": False, "learning_curves": True}


def test_the_summary_knows_what_came_after_the_ingest(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "a-1", status="running")
    run.start(1)
    run.steps(1, 4, reward=0.25)
    ingest(tmp_path)
    run.steps(5, 6, reward=1.0)
    assert summary(tmp_path) == [("a-1", 6, 0.5, 0.5)]
    ingest(tmp_path)
    run.start(2, resumed_from_step=4)
    assert summary(tmp_path) == [("a-1", 4, 0.25, 0.25)], "steps 5 and 6 are superseded"
    run.steps(5, 5, reward=0.5)
    assert summary(tmp_path) == [("a-1", 5, 0.3, 0.3)]
    ingest(tmp_path)
    assert summary(tmp_path) == [("a-1", 5, 0.3, 0.3)]


def test_a_run_with_damaged_metrics_has_the_summary_of_the_others_with_a_warning(tmp_path: Path) -> None:
    for name in ("a-1", "a-2"):
        run = RecordedRun(tmp_path, name)
        run.start(1)
        run.steps(1, 2)
    broken = segment(run, "metrics", 2)
    columns = pq.read_metadata(broken).row_group(0)
    with open(broken, "r+b") as file:
        for number in range(columns.num_columns):
            file.seek(columns.column(number).data_page_offset)
            file.write(b"\xff" * 16)
    settle(tmp_path)
    for _ in range(2):
        with Store.open(tmp_path) as store:
            answer = store.query(SUMMARY)
        assert answer.rows == [("a-1", 2, 0.5, 0.5), ("a-2", 1, 0.5, 0.5)]
        assert f"metrics/{broken.name}: damaged" in answer.warnings[0]
        ingest(tmp_path)
