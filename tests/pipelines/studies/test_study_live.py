"""Studies of real runs through the command line: killed, gone on with, submitted."""

import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from live import SIGNAL, Lab, finished, kill
from waiting import wait_for

from specs.machine.files import digest, read_json

STUDY = """\
name: clips
question: Which clip?
experiment: tiny.yaml
overrides:
  training.steps: 4
  training.checkpoint.every_steps: 1
  objective.kl_coef: 1e-2
  objective.clip: {type: dual}
  reference: {source: snapshot, update: {every_steps: 2}}
  stages.evaluate.retries: 0
parameters:
  objective.clip.low: {float: [0.05, 0.5]}
  objective.clip.high: {float: [0.05, 1.0], log: true}
  reference.update.every_steps: {int: [1, 3]}
goal: {dataset: held_out, metric: mean@2}
sampler: {startup_trials: 4}
trials: 8
"""
RATES = STUDY.replace(
    "  reference.update.every_steps: {int: [1, 3]}\n",
    "  training.optimizer.learning_rate: {float: [1.0e-4, 1.0e-2], log: true}\n",
)
"""Every trial has weights of its own; by other bounds of a clip that never acts it would not."""
SEED = int(os.environ.get("RPG_KILL_SEED", random.SystemRandom().randrange(2**31)))
"""Seed of the moments; a failing test names it, and setting it gives the same moments again."""


@pytest.fixture
def study(lab: Lab) -> Path:
    path = lab.spec.with_name("study.yaml")
    path.write_text(STUDY)
    return path


@pytest.mark.long
def test_a_killed_study_of_two_trials_goes_on_and_tells_each_once(lab: Lab, study: Path) -> None:
    kill_while_training(lab, study, trials=2, seconds=random.Random(SEED).uniform(0, 4))
    assert_goes_on(lab, study, trials=2)


@pytest.mark.long
def test_a_study_of_eight_trials_survives_three_kills(lab: Lab, study: Path) -> None:
    moments = random.Random(SEED)
    for _ in range(3):
        kill_while_training(lab, study, trials=8, seconds=moments.uniform(0, 12))
    assert_goes_on(lab, study, trials=8)
    again = lab.rpg("study", "run", str(study))
    assert again.code == 0, again.err
    assert "trial" not in again.err.replace("startup_trials", "")
    page = (lab.home.study("clips") / "report.html").read_text()
    assert "Candidate:" in page
    listed = lab.rpg("study", "list").out
    assert "8/8" in listed
    assert "maximize mean@2 on held_out" in listed


@pytest.mark.long
def test_a_trial_goes_on_when_its_trainer_is_killed_again_and_again(lab: Lab, study: Path) -> None:
    moments = random.Random(SEED)
    lasting = ("trials=2", "overrides.stages.train.retry_delay_seconds=0", "overrides.training.steps=60")
    command = lab.start("study", "run", str(study), overrides=lasting)
    killed: set[int] = set()
    while command.poll() is None and len(killed) < 5:
        trainer = lab.training_pid()
        if trainer and trainer not in killed:
            time.sleep(moments.uniform(0, 3))
            with suppress(ProcessLookupError):  # it has ended
                kill(trainer)
                killed.add(trainer)
        time.sleep(0.1)
    assert len(killed) >= 3, SEED
    finished(command, timeout=600)
    assert_goes_on(lab, study, trials=2, overrides=lasting[1:])


@pytest.mark.long
def test_a_cancelled_study_saves_and_goes_on(lab: Lab, study: Path) -> None:
    command = lab.start("study", "run", str(study), overrides=("trials=2", "overrides.training.steps=200"))
    wait_for(lambda: lab.query("SELECT count(*) FROM metrics WHERE step >= 3")[0][0], what="a few steps")
    assert lab.rpg("study", "cancel", "clips").code == 0
    ended = finished(command, timeout=60)
    assert ended.code == 130, ended.err
    assert "the same command continues from here" in ended.err
    assert lab.processes() == []
    assert lab.query("SELECT number, state FROM trials") == [(0, "pending")]
    (run_id,) = lab.run_ids()
    assert lab.state(run_id)["status"] == "cancelled"
    assert list(lab.home.run(run_id).glob("checkpoints/step-*")), "its state is saved"


@pytest.mark.long
def test_two_trials_at_a_time_share_what_they_do_not_vary(lab: Lab, study: Path) -> None:
    result = lab.rpg("study", "run", str(study), "--parallel", "2", overrides=("trials=4",), anew=True, timeout=900)
    assert result.code == 0, (result.err, SEED)
    assert "[2] trial " in result.err, "the second worker did some"
    assert_goes_on(lab, study, trials=4)


@pytest.mark.long
def test_promoted_trials_have_the_weights_of_uninterrupted_ones(lab: Lab, study: Path) -> None:
    pruned, whole = study.with_name("pruned.yaml"), study.with_name("whole.yaml")
    text = RATES.replace("startup_trials: 4", "type: random").replace("training.steps: 4", "training.steps: 6")
    given = "".join(f"  {path}: {value}\n" for path, value in (each.split("=") for each in SIGNAL))
    text = text.replace("overrides:\n", f"overrides:\n{given}")
    pruned.write_text(text.replace("trials: 8", "trials: 5\npruner: {type: asha, rungs: [2, 4]}"))
    whole.write_text(text.replace("trials: 8", "trials: 5").replace("name: clips", "name: whole"))
    aside = lab.root / "aside"
    for path in (pruned, whole):
        result = lab.rpg("study", "run", str(path), timeout=1200)
        assert result.code == 0, result.err
        if path == pruned:
            (lab.root / "runs").rename(aside)  # else the other study would take what these have trained
    for run in aside.iterdir():
        run.rename(lab.root / "runs" / run.name)
    trials, straight = (read_json(lab.home.study(name) / "study.json")["trials"] for name in ("clips", "whole"))
    assert [trial["params"] for trial in trials] == [trial["params"] for trial in straight]
    promoted = [number for number, trial in enumerate(trials) if trial["state"] == "finished" and trial["rungs"]]
    assert promoted, "at least one comes to its end"
    for number in promoted:
        lab.assert_trained(straight[number]["run_id"])
        assert weights(lab, trials[number]) == weights(lab, straight[number])
        assert trials[number]["value"] == straight[number]["value"]
    assert len({weights(lab, trial) for trial in straight}) == len(straight), "what trials vary makes a difference"
    assert sum(trial["tokens"] for trial in trials) < sum(trial["tokens"] for trial in straight)
    assert {trial["state"] for trial in trials} == {"finished", "pruned"}
    assert {row[0] for row in lab.query("SELECT count(*) FROM metrics GROUP BY run_id, step, name")} == {1}


def weights(lab: Lab, trial: dict[str, Any]) -> str:
    return digest(lab.home.run(trial["run_id"]) / "weights" / "step-000006" / "model.safetensors")


@pytest.mark.long
def test_a_submitted_study_runs_in_the_worker(lab: Lab, study: Path) -> None:
    assert lab.rpg("up").code == 0
    try:
        submitted = lab.rpg("study", "submit", str(study), overrides=("trials=2",))
        assert submitted.code == 0, submitted.err
        assert "/runs/flow-run/" in submitted.out
        wait_for(lambda: (lab.home.study("clips") / "report.html").is_file(), timeout=400, what="the study's report")
    finally:
        lab.rpg("down")
    assert lab.query("SELECT count(*), count(value) FROM trials WHERE state = 'finished'") == [(2, 2)]


def kill_while_training(lab: Lab, study: Path, *, trials: int, seconds: float) -> None:
    """Starts the study, kills the command `seconds` after a training has begun, and sees everything end."""
    command = lab.start("study", "run", str(study), overrides=(f"trials={trials}",), anew=True)
    wait_for(lambda: lab.training_pid() or command.poll() is not None, what="a training")
    time.sleep(seconds)
    kill(command.pid)
    finished(command)
    wait_for(lambda: not lab.processes(), timeout=10, what="the end of all processes")


def assert_goes_on(lab: Lab, study: Path, *, trials: int, overrides: tuple[str, ...] = ()) -> None:
    """The next call finishes; every trial is there once, told once, and its run recorded once."""
    wanted = (f"trials={trials}", *overrides)
    result = lab.rpg("study", "run", str(study), overrides=wanted, timeout=500 + 60 * trials)
    assert result.code == 0, (SEED, result.err)
    assert "mean@2 on held_out" in result.out
    assert f"report: {lab.home.study('clips') / 'report.html'}" in result.out
    told = lab.query("SELECT number, state, value, run_id FROM trials ORDER BY number")
    assert [row[:2] for row in told] == [(number, "finished") for number in range(trials)], SEED
    measured = dict(lab.query("SELECT run_id, value FROM evaluations WHERE metric = 'mean@2' AND step > 0"))
    assert all(measured[run_id] == pytest.approx(value) for _, _, value, run_id in told), SEED
    assert {row[0] for row in lab.query("SELECT count(*) FROM metrics GROUP BY run_id, step, name")} == {1}, SEED
    made = [read_json(path)["stage"] for path in lab.root.glob("artifacts/*/*/manifest.json")]
    assert sorted(set(made)) == ["base", "data"]
    assert made.count("base") == 1, "the trials share one base model"
