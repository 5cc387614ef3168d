"""`rpg run --parallel`: several real runs at a time, and what stops them."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import SIGNAL, SPEC, Lab, copy_prefect_database, finished, kill
from typer.testing import CliRunner
from waiting import wait_for

from pipelines.cli import app
from storage import Store

TWO = ("seeds=[0,1]",)
LONG = ("seeds=[0,1,2]", "training.steps=400", "training.checkpoint.every_steps=50", "stages.train.retries=0")


def metrics(root: Path, run_id: str) -> dict[tuple[str, int], float]:
    """Those that measure no time or memory."""
    with Store.open(root) as store:
        rows = store.query("select name, step, value from metrics where run_id = ?", [run_id]).rows
    clocked = ("time/", "tokens_per_second/", "memory/")
    return {(name, step): value for name, step, value in rows if not name.startswith(clocked)}


def start_two_of_three(lab: Lab) -> Any:
    """Three long runs, two at a time; returns the command when both train."""
    command = lab.start("run", str(lab.spec), "--parallel", "2", overrides=LONG)

    def both_train() -> bool:
        assert command.poll() is None, finished(command).err
        return len(lab.run_ids()) == 2 and all(lab.progress(run_id) for run_id in lab.run_ids())

    wait_for(both_train, timeout=200, what="two runs that train")
    return command


def assert_dead_in_time(lab: Lab) -> None:
    wait_for(lambda: not lab.processes(), timeout=10, what="the end of all processes")


@pytest.mark.long
def test_runs_at_the_same_time_share_what_both_need_and_give_what_each_alone_would(lab, prepared_home):
    shutil.rmtree(lab.root / "artifacts" / "base")
    result = lab.rpg("run", str(lab.spec), "--parallel", "2", overrides=(*TWO, *SIGNAL))
    assert result.code == 0, result.err
    first, second = lab.run_ids()
    states = [lab.state(run_id) for run_id in (first, second)]
    assert [state["status"] for state in states] == ["finished", "finished"]
    assert max(state["started_at"] for state in states) < min(state["stages"]["train"]["ended_at"] for state in states)
    assert sorted(state["stages"]["base"]["cached"] for state in states) == [False, True], "made once, waited for"
    alone = Lab(lab.root.with_name("alone"), lab.spec)
    copy_prefect_database(prepared_home, alone.root)
    assert alone.rpg("run", str(lab.spec), overrides=SIGNAL).code == 0
    assert alone.run_ids() == [first]
    lab.assert_trained(first)
    assert metrics(lab.root, first) == metrics(alone.root, first) != metrics(lab.root, second)
    assert "held_out  before " in result.out
    assert "2 seeds" in result.out
    assert (lab.root / "experiments/tiny/report.html").is_file()
    assert f"[1/2] {first}  seed 0  finished" in result.err
    assert "\n1 of 2 runs have ended" in result.err
    assert result.err.rstrip().endswith("2 of 2 runs have ended")
    flows = lab.prefect_rows("select name, state_name from flow_run order by created desc limit 2")
    assert sorted(flows) == [("tiny: seed 0", "Completed"), ("tiny: seed 1", "Completed")]
    assert lab.processes() == []


@pytest.mark.usefixtures("signals_arrive")
@pytest.mark.long
def test_an_interrupt_stops_every_run_with_its_checkpoint_and_begins_no_other(lab):
    command = start_two_of_three(lab)
    os.kill(command.pid, signal.SIGINT)
    result = finished(command, timeout=60)
    assert result.code == 130, result.err
    assert_dead_in_time(lab)
    assert len(lab.run_ids()) == 2
    for run_id in lab.run_ids():
        state = lab.state(run_id)
        assert (state["status"], state["reason"]) == ("cancelled", "train: interrupted by SIGINT")
        assert list(lab.home.run(run_id).glob("checkpoints/step-*"))
        assert f"rpg resume {run_id}" in result.out


@pytest.mark.usefixtures("signals_arrive")
@pytest.mark.long
def test_a_second_interrupt_kills_what_still_runs(lab):
    command = start_two_of_three(lab)
    os.kill(command.pid, signal.SIGINT)
    time.sleep(0.1)
    os.kill(command.pid, signal.SIGINT)
    assert finished(command, timeout=10).code == 130
    assert_dead_in_time(lab)


@pytest.mark.long
def test_a_worker_that_dies_costs_its_run_alone_and_none_outlives_the_command(lab):
    command = start_two_of_three(lab)
    lost, other = lab.run_ids()
    kill(lab.state(lost)["pid"])
    third = wait_for(lambda: set(lab.run_ids()) - {lost, other}, what="the third run in its place").pop()
    wait_for(lambda: lab.state(third).get("pid"), what="the third run's process")
    assert psutil.pid_exists(lab.state(other)["pid"])
    kill(command.pid)
    assert_dead_in_time(lab)
    err = finished(command).err
    assert f"[1/3] {lost}  seed 0  failed" in err
    assert f"[3/3] {third}  seed 2\n" in err


def test_a_mistake_of_the_users_ends_all_runs_and_is_said_once(lab, monkeypatch, tmp_path):
    monkeypatch.setenv("RPG_SLOTS", "only")
    monkeypatch.setenv("RPG_SLOT_DIR", str(tmp_path / "slots"))
    result = lab.rpg("run", str(lab.spec), "--parallel", "2", overrides=(*TWO, "training.ranks=2"))
    assert result.code == 2, (result.code, result.err)
    assert result.err.count("training.ranks: too many for this machine") == 1
    assert result.err.rstrip().endswith("1 error; nothing was run")
    assert lab.processes() == []


@pytest.mark.parametrize("count", ["0", "many", "-1"])
def test_a_number_of_runs_is_a_number_or_auto(tmp_path, count):
    (tmp_path / "tiny.yaml").write_text(SPEC)
    result = CliRunner().invoke(app, ["run", str(tmp_path / "tiny.yaml"), f"--parallel={count}"])
    assert result.exit_code == 2
    assert "a number from 1 on, or auto" in result.output
