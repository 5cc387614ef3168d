"""The estimate of the time that all runs of a command still take."""

from pathlib import Path

import pytest
from live import SPEC

from pipelines.home.home import Home
from pipelines.planning.plan import RunPlan, make_plan
from pipelines.running.time_left import TimeLeft
from specs.loader import load_document


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunPlan, ...]:
    """Four runs of six steps, of which nothing is done yet."""
    (tmp_path / "tiny.yaml").write_text(SPEC)
    return make_plan(load_document(tmp_path / "tiny.yaml", ("seeds=[0,1,2,3]",)), Home(tmp_path / "home")).runs


def do(left: TimeLeft, run: RunPlan, **took: float) -> None:
    for stage, seconds in took.items():
        left.stage_started(run.run_id, stage)
        left.stage_ended(run.run_id, stage, "done", seconds)


WHOLE = {"data": 5.0, "base": 20.0, "train": 60.0, "evaluate": 30.0, "report": 10.0}


def test_what_one_run_took_is_what_the_others_will_take_without_what_they_share(runs):
    left = TimeLeft(runs)
    assert left.words() == ""
    do(left, runs[0], **WHOLE)
    left.run_ended(runs[0].run_id)
    assert left.words() == "about 5 min left"  # 3 x 100 s
    assert (left.ended, left.total) == (1, 4)


def test_runs_at_a_time_divide_the_time_but_none_is_shorter_than_itself(runs):
    left = TimeLeft(runs, 2)
    do(left, runs[0], **WHOLE)
    left.run_ended(runs[0].run_id)
    assert left.words() == "about 2 min left"  # 300 s by two
    for run in runs[1:3]:
        do(left, run, **WHOLE)
        left.run_ended(run.run_id)
    assert left.words() == "about 2 min left"  # one of 100 s, which two do no faster
    left.run_ended(runs[3].run_id)
    assert left.words() == ""


def test_before_each_stage_was_done_once_it_is_a_lower_bound_from_the_steps_so_far(runs):
    left = TimeLeft(runs)
    do(left, runs[0], data=5, base=20)
    left.stage_started(runs[0].run_id, "train")
    left.training(runs[0].run_id, {"step": 2, "steps": 6, "metrics": {"time/step": 15.0, "time/evaluate": 5.0}})
    assert left.words() == "at least 4 min left"  # (4 + 3 x 6) steps of 10 s


def test_a_stage_under_way_is_counted_down_and_a_failed_run_has_nothing_left(runs):
    clock = [0.0]
    left = TimeLeft(runs[:2], clock=lambda: clock[0])
    do(left, runs[0], **WHOLE)
    left.run_ended(runs[0].run_id)
    do(left, runs[1], train=60)
    left.stage_started(runs[1].run_id, "evaluate")
    clock[0] = 12.0
    assert left.words() == "about 28 s left"  # 30 - 12, and the report's 10
    left.stage_ended(runs[1].run_id, "evaluate", "failed", 12)
    left.run_ended(runs[1].run_id)
    assert left.words() == ""
