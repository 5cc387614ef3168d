"""Progress lines: few and whole where stderr is no terminal."""

import io
import re
from pathlib import Path

import pytest
from live import SPEC
from rich.console import Console

from pipelines.home.home import Home
from pipelines.planning.plan import RunPlan, make_plan
from pipelines.running import progress
from pipelines.running.progress import ConsoleProgress, ParallelProgress, RunsReporter, logged_line, training_line
from pipelines.running.time_left import TimeLeft
from specs.loader import load_document


def plain() -> tuple[ConsoleProgress, io.StringIO]:
    out = io.StringIO()
    return ConsoleProgress(Console(file=out, force_terminal=False, highlight=False, soft_wrap=True)), out


def test_a_stage_is_one_line_and_a_cached_one_has_no_time():
    shown, out = plain()
    shown.run_started("tiny-s0-1", "kl_coef=0.1 seed 0", 1, 2)
    shown.stage_started("data", "new")
    shown.stage_ended("data", "done", 1.25)
    shown.stage_started("base", "done")
    shown.stage_ended("base", "cached", 0.01)
    expected = "[1/2] tiny-s0-1  kl_coef=0.1 seed 0\n  data      finished  1.2 s\n  base      cached\n"
    assert out.getvalue() == expected


@pytest.mark.parametrize(
    ("reason", "shown_as"), [("new", "train  starting"), ("seed 0 -> 1", "train  starting: seed 0 -> 1")]
)
def test_a_stage_that_begins_is_starting(reason, shown_as):
    out = io.StringIO()
    shown = ConsoleProgress(Console(file=out, force_terminal=True, highlight=False, width=80))
    shown.run_started("tiny-s0-1", "seed 0", 1, 1)
    shown.stage_started("train", reason)
    shown.stage_ended("train", "done", 1.0)
    assert shown_as in out.getvalue()
    assert "new" not in out.getvalue()


def test_a_stage_and_a_run_end_in_the_words_of_the_record(runs):
    shown, out = plain()
    shown.run_started("tiny-s0-1", "seed 0", 1, 1)
    for outcome in ("done", "cached", "stopped", "failed"):
        shown.stage_ended("train", outcome, 1.0)
    words = [line.split()[1] for line in out.getvalue().splitlines()[1:]]
    assert words == ["finished", "cached", "cancelled", "failed"]
    several = ParallelProgress(TimeLeft(runs, 2), Console(file=out, highlight=False, soft_wrap=True))
    for status in ("finished", "cancelled", "failed", "busy"):
        several.run_started(runs[0].run_id, "seed 0", 1, 2)
        several.run_ended(runs[0].run_id, status)
    ended = [line.split()[-1] for line in out.getvalue().splitlines() if line.startswith("[1/2]") and "0  " in line]
    assert [word for word in ended if word != "0"] == ["finished", "cancelled", "failed", "running"]


def test_brackets_in_a_name_are_no_markup():
    shown, out = plain()
    shown.run_started("tiny-s0-1", "data.mix=[a, b] [/] seed 0", 1, 2)
    assert out.getvalue() == "[1/2] tiny-s0-1  data.mix=[a, b] [/] seed 0\n"


def test_lines_about_a_stage_come_now_and_then_and_never_twice(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    shown, out = plain()
    shown.stage_started("base", "new")
    for seconds, text in ((11, "step 1 [x]"), (1, "step 2 [x]"), (11, "step 3 [x]"), (11, "step 3 [x]")):
        clock[0] += seconds
        shown.waiting(text)
    assert out.getvalue().splitlines() == ["  base  step 1 [x]", "  base  step 3 [x]"]


def test_a_training_line_shows_what_there_is():
    metrics = {"reward/mean": 0.4375, "time/step": 0.5, "kl/reverse": None}
    assert training_line({"step": 2, "steps": 10, "metrics": metrics}) == "step 2/10  reward 0.4375  4 s left"
    evaluated = {"step": 4, "steps": 4, "metrics": {}, "evaluation": "mean@8 on sums 0.412 at step 3"}
    assert training_line(evaluated) == "step 4/4  mean@8 on sums 0.412 at step 3"
    assert training_line({}) == "step 0/0"


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunPlan, ...]:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    return make_plan(load_document(tmp_path / "tiny.yaml", ("seeds=[0,1]",)), Home(tmp_path / "home")).runs


def report(shown: RunsReporter, run: RunPlan, position: int, *, seconds: float) -> None:
    """Returns a run in which each stage takes this long."""
    reporter = shown.run_started(run.run_id, run.name, position, 2)
    for stage in run.stages:
        reporter.stage_started(stage.stage, stage.reason)
        reporter.stage_ended(stage.stage, "done", seconds)
    shown.run_ended(run.run_id, "finished")


def test_of_several_runs_the_heading_of_the_next_says_what_all_will_take(runs):
    out = io.StringIO()
    shown = ConsoleProgress(Console(file=out, highlight=False, soft_wrap=True), left=TimeLeft(runs))
    for position, run in enumerate(runs, 1):
        report(shown, run, position, seconds=20)
    headings = [line for line in out.getvalue().splitlines() if line.startswith("[")]
    assert headings == [
        f"[1/2] {runs[0].run_id}  seed 0",
        f"[2/2] {runs[1].run_id}  seed 1  (all runs: about 60 s left)",
    ]


def test_runs_at_a_time_have_a_line_each_and_one_for_all_on_a_terminal(runs):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=90, color_system=None)
    with ParallelProgress(TimeLeft(runs, 2), console) as shown:
        first, second = (shown.run_started(run.run_id, run.name, at, 2) for at, run in enumerate(runs, 1))
        first.stage_started("train", "new")
        first.training({"step": 2, "steps": 10, "metrics": {"reward/mean": 0.5, "time/step": 2.0}})
        second.stage_started("data", "new")
        second.waiting("another run is making the same data")
        console.print(shown._lines())
        shown.run_ended(runs[0].run_id, "failed")
    shown_lines = re.sub(r"\x1b\[[?0-9]*[a-zA-Z]", "", out.getvalue()).splitlines()
    assert f"[1/2] {runs[0].run_id}  seed 0  train  step 2/10  reward 0.5  16 s left" in shown_lines
    assert f"[2/2] {runs[1].run_id}  seed 1  data  another run is making the same data" in shown_lines
    assert "0 of 2 runs have ended, at least 16 s left" in shown_lines
    assert f"[1/2] {runs[0].run_id}  seed 0  failed" in shown_lines


def test_nothing_is_said_before_the_first_step(monkeypatch):
    shown, out = plain()
    shown.stage_started("train", "new")
    monkeypatch.setattr(shown, "_last_line", 0.0)
    shown.training({})
    assert out.getvalue() == ""


def test_a_stages_last_line_is_shown_without_time_and_name_until_it_says_that_it_is_done(tmp_path: Path):
    log, shown = tmp_path / "base.log", []
    before = "2026-11-22 18:28:06 base: done in 3.0 s\n"
    for line in ("", "base: started", "warm-up 8/1500: loss 4.7, 11 s", "base: done in 145.0 s"):
        log.write_text(before + (f"2026-11-22 18:28:07 {line}\n" if line else ""))
        shown.append(logged_line(log, "base", since=len(before)))
    assert shown == ["", "started", "warm-up 8/1500: loss 4.7, 11 s", ""]
