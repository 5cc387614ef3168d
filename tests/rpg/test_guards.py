"""Guards: when they act, their effect on a real run, and the same effect on a killed run."""

import json
import math
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from rpg.guards import Guards
from specs.metrics import METRICS
from specs.schema.training import Guard
from tests.rpg.tiny_run import finish, make_run, rows, start, train

WITHIN = dict.fromkeys((metric.name for metric in METRICS if metric.guardable), 0.5)


def guarded(inputs: Path, run_dir: Path, *guards: dict[str, Any], **training: Any) -> Path:
    return make_run(inputs, run_dir, training={"guards": list(guards), **training})


def figures(run_dir: Path, name: str) -> dict[int, float]:
    return {row["step"]: row["value"] for row in rows(run_dir, "metrics") if row["name"] == name}


def test_a_streak_is_counted_and_broken_and_a_warning_is_given_once(tmp_path: Path) -> None:
    guards = Guards([Guard(metric="entropy", below=0.1, for_steps=2, action="warn")], tmp_path / "guards.json")
    low = WITHIN | {"entropy": 0.05}
    run = (low, WITHIN, low, low, low, WITHIN, low, low)
    fired = [guards.check(step, metrics) for step, metrics in enumerate(run, 1)]
    assert [step for step, guards_fired in enumerate(fired, 1) if guards_fired] == [4, 8]
    assert fired[3][0].since == 3
    assert fired[3][0].message == "step 4: entropy 0.05 is below 0.1 in 2 consecutive steps"


def test_nan_violates_a_guard_and_an_infinite_loss_stops_a_run_without_guards_on_it(tmp_path: Path) -> None:
    guards = Guards([Guard(metric="kl/reverse", above=1.0)], tmp_path / "guards.json")
    assert [fired.guard.metric for fired in guards.check(1, WITHIN | {"kl/reverse": math.nan})] == ["kl/reverse"]
    (fired,) = guards.check(2, WITHIN | {"loss": math.inf})
    assert (fired.guard.action, fired.message) == ("stop", "step 2: the loss is inf")


def test_streaks_and_roll_backs_survive_where_they_are_kept(tmp_path: Path) -> None:
    watched = [Guard(metric="entropy", below=0.1, for_steps=2, action="roll_back", at_most=1)]
    guards = Guards(watched, tmp_path / "guards.json")
    low = WITHIN | {"entropy": 0.05}
    guards.check(5, low)
    state = guards.state_dict()
    (fired,) = guards.check(6, low)
    assert guards.may_roll_back(fired)
    guards.record_roll_back(fired, 4, write=True)
    again = Guards(watched, tmp_path / "guards.json")
    again.load_state_dict(state)
    assert not again.may_roll_back(fired)
    assert again.roll_back_bounds(fired) == [3, 4], "before the checkpoint that did not help, else there again"
    assert [again.learning_rate_factor(step) for step in (4, 5)] == [1, 0.5]
    assert [fired.since for fired in again.check(6, low)] == [5]


def test_every_metric_can_be_guarded_and_warn_and_stop_do_so(inputs: Path, tmp_path: Path) -> None:
    watch = [{"metric": name, "above": -1e9, "action": "warn"} for name in WITHIN]
    stop = {"metric": "response_length/mean", "above": 0.5, "for_steps": 3}
    run_dir = guarded(inputs, tmp_path / "stop", *watch, stop)
    printed = train(run_dir, expect=1)
    events = [(row["step"], row["kind"]) for row in rows(run_dir, "events") if row["kind"].startswith("guard")]
    assert events == [(1, "guard_warned")] * len(WITHIN) + [(3, "guard_stopped")]
    assert "in 3 consecutive steps" in printed
    assert "Traceback" not in printed
    assert max(figures(run_dir, "loss")) == 3, "the step that ended it is on record"
    assert [path.name for path in (run_dir / "checkpoints").glob("step-*")] == ["step-000002"]


@pytest.mark.long
def test_a_guard_gives_up_after_as_many_roll_backs_as_it_may_make(inputs: Path, tmp_path: Path) -> None:
    """On policy kl/reverse is 0 in step 1 and greater in step 2, whatever the rate of step 2."""
    guard = {"metric": "kl/reverse", "above": 0.0, "action": "roll_back", "at_most": 1}
    changes = {"guards": [guard], "minibatches": 1, "checkpoint": {"every_steps": 1}}
    run_dir = make_run(inputs, tmp_path / "back", training=changes)
    printed = train(run_dir, expect=1)
    assert "is above 0, after 1 roll-back(s)" in printed
    events = [(row["step"], row["kind"]) for row in rows(run_dir, "events")]
    assert [event for event in events if "roll" in event[1] or "guard" in event[1]] == [
        (1, "rolled_back"),
        (2, "guard_stopped"),
    ]
    assert len(figures(run_dir, "loss")) == 2


@pytest.mark.long
def test_a_killed_run_goes_back_as_one_that_was_not_killed(inputs: Path, tmp_path: Path) -> None:
    """kl/reverse is 0 in the first update's policy and grows: the bound is crossed in some later step."""
    free = make_run(inputs, tmp_path / "free", training={"steps": 6, "checkpoint": {"every_steps": 1}})
    train(free)
    seen = figures(free, "ratio/max")
    late = max(range(3, 7), key=lambda step: seen[step])
    bound = max(value for step, value in seen.items() if step < late)
    if bound >= seen[late]:
        pytest.fail(f"no step stands out: {seen}")
    guard = {"metric": "ratio/max", "above": bound, "action": "roll_back", "learning_rate_factor": 0.1, "at_most": 9}
    changes = {"guards": [guard], "checkpoint": {"every_steps": 1}}
    whole = make_run(inputs, tmp_path / "whole/run", training=changes)
    printed = train(whole)
    assert f"step {late}: ratio/max" in printed
    ledger = json.loads((whole / "guards.json").read_text())
    assert (ledger[0]["at_step"], ledger[0]["to_step"]) == (late, late - 1)
    rates, free_rates = figures(whole, "learning_rate"), figures(free, "learning_rate")
    for step in (late - 1, late):  # a guard that fires again goes further back
        factor = 0.1 ** sum(entry["to_step"] < step for entry in ledger)
        assert rates[step] == pytest.approx(factor * free_rates[step])
    gone_back = [row["step"] for row in rows(whole, "events") if row["kind"] == "rolled_back"]
    assert gone_back == [entry["to_step"] for entry in ledger]
    assert sorted(rates) == [1, 2, 3, 4, 5, 6], "each step once"
    killed = make_run(inputs, tmp_path / "killed/run", training=changes)
    process = start([sys.executable, "-m", "rpg.train", str(killed)])
    wait_for_file(killed / "guards.json")
    process.send_signal(signal.SIGKILL)
    finish(process, expect=-signal.SIGKILL)
    train(killed)
    assert json.loads((killed / "guards.json").read_text()) == ledger
    for name in ("loss", "learning_rate", "kl/reverse", "grad_norm", "reward/mean"):
        assert figures(killed, name) == figures(whole, name), name


@pytest.mark.long
def test_a_gradient_that_is_no_number_can_be_gone_back_from(inputs: Path, tmp_path: Path) -> None:
    """Two good steps, then one at a rate that no weights survive, unless it is multiplied by 1e-32."""
    good = {"steps": 2, "schedule": {"type": "constant"}, "checkpoint": {"every_steps": 1}}
    reference = {"source": "behaviour", "update": None}
    run_dir = make_run(inputs, tmp_path / "nan", training=good, reference=reference)
    train(run_dir)
    guard = {"metric": "not_finite", "action": "roll_back", "learning_rate_factor": 1e-32}
    bad = {"steps": 4, "guards": [guard], "optimizer": {"learning_rate": 1e30, "max_grad_norm": 1e30}}
    other = make_run(inputs, tmp_path / "other", training=good | bad, reference=reference)
    (other / "spec.json").replace(run_dir / "spec.json")
    (run_dir / "train.json").unlink()
    printed = train(run_dir)
    assert "the gradient norm is nan" in printed
    assert "back to step 2, the learning rate times 1e-32 from there" in printed
    assert [entry["to_step"] for entry in json.loads((run_dir / "guards.json").read_text())] == [2]
    assert figures(run_dir, "learning_rate")[3] == pytest.approx(0.01)
    assert all(math.isfinite(value) for value in figures(run_dir, "grad_norm").values())


def wait_for_file(path: Path) -> None:
    wait_for(path.exists, what=str(path))
