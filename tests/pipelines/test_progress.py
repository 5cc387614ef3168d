"""Progress lines: few and whole where stderr is no terminal."""

import io

from rich.console import Console

from pipelines.running import progress
from pipelines.running.progress import ConsoleProgress, training_line


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
    expected = "[1/2] tiny-s0-1  kl_coef=0.1 seed 0\n  data      done  1.2 s\n  base      cached\n"
    assert out.getvalue() == expected


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


def test_nothing_is_said_before_the_first_step(monkeypatch):
    shown, out = plain()
    shown.stage_started("train", "new")
    monkeypatch.setattr(shown, "_last_line", 0.0)
    shown.training({})
    assert out.getvalue() == ""
