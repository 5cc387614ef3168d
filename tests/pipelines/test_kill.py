"""`kill -9` at any moment: nothing lives on, the next `rpg run` finishes, and no row is missing or doubled."""

import os
import random
import time

import psutil
import pytest
from live import Lab, finished, kill, wait_for

STEPS = 30
OVERRIDES = (f"training.steps={STEPS}", "training.checkpoint.every_steps=4")
NO_RETRY = (*OVERRIDES, "stages.train.retries=0")
SEED = int(os.environ.get("RPG_KILL_SEED", random.SystemRandom().randrange(2**31)))
"""Of the moments; a failing test names it, and setting it gives the same moments again."""

few = pytest.mark.parametrize("number", range(3))
many = pytest.mark.parametrize("number", range(3, 10))


@few
def test_a_killed_flow_leaves_nothing_and_the_next_run_finishes(lab, number):
    kill_the_flow(lab, number)


@pytest.mark.long
@many
def test_a_killed_flow_leaves_nothing_at_more_moments(lab, number):
    kill_the_flow(lab, number)


@few
def test_a_killed_trainer_leaves_nothing_and_the_next_run_finishes(lab, number):
    kill_the_trainer(lab, number)


@pytest.mark.long
@many
def test_a_killed_trainer_leaves_nothing_at_more_moments(lab, number):
    kill_the_trainer(lab, number)


def test_a_killed_trainer_is_started_again_by_the_same_run(lab):
    run = lab.start("run", str(lab.spec), overrides=(*OVERRIDES, "stages.train.retry_delay_seconds=0"))
    pid = wait_for(lab.training_pid, what="the trainer")
    wait_for(lambda: lab.progress(lab.run_ids()[0]) >= 6, what="step 6")
    kill(pid)
    result = finished(run)
    assert result.code == 0, result.err
    assert "once more in 0 s: train was killed by SIGKILL" in result.err
    assert_complete(lab)
    attempts = sorted(path.name for path in lab.home.run(lab.run_ids()[0]).glob("attempts/*.json"))
    assert attempts == ["0001.json", "0002.json"]


def kill_the_flow(lab: Lab, number: int) -> None:
    """Any time from the server's start to the last stage."""
    moments = random.Random(f"{SEED} flow {number}")
    run = lab.start("run", str(lab.spec), overrides=OVERRIDES)
    if number % 3 == 0:
        time.sleep(moments.uniform(0, 8))
    else:
        wait_for(lab.training_pid, what="the trainer")
        time.sleep(moments.uniform(0, 8))
    kill(run.pid)
    run.communicate()
    assert_dead_in_time(lab, f"seed {SEED}")
    assert_next_run_finishes(lab, OVERRIDES)


def kill_the_trainer(lab: Lab, number: int) -> None:
    """Any time of its life; the launcher or the rank under it."""
    moments = random.Random(f"{SEED} trainer {number}")
    run = lab.start("run", str(lab.spec), overrides=NO_RETRY)
    pid = wait_for(lab.training_pid, what="the trainer")
    if number % 3 != 0:
        wait_for(lambda: lab.progress(lab.run_ids()[0]) or run.poll() is not None, what="the first step")
    time.sleep(moments.uniform(0, 3))
    try:
        ranks = psutil.Process(pid).children()
        kill(moments.choice([pid, *(rank.pid for rank in ranks)]))
    except (psutil.Error, ProcessLookupError):
        pass  # It was done already: then there is nothing to lose.
    assert_dead_in_time(lab, f"seed {SEED}", while_running=run)
    run.communicate()
    assert_next_run_finishes(lab, NO_RETRY)


def assert_dead_in_time(lab: Lab, where: str, while_running=None) -> None:
    """Ten seconds after the kill no process of the run lives, the API server included.

    Where the trainer is killed its flow may still be writing that it failed; should it have been done before the kill,
    the flow has an evaluation to finish first.
    """
    if while_running is not None and psutil.pid_exists(while_running.pid):
        deadline = time.monotonic() + 10
        while lab.training_pid() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not lab.training_pid(), where
        wait_for(lambda: while_running.poll() is not None, timeout=120, what="the flow")
    deadline = time.monotonic() + 10
    while (alive := lab.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive == [], (where, [process.cmdline() for process in alive])


def assert_next_run_finishes(lab: Lab, overrides: tuple[str, ...]) -> None:
    result = lab.rpg("run", str(lab.spec), overrides=overrides)
    assert result.code == 0, (SEED, result.err)
    assert_complete(lab)
    assert lab.processes() == []


def assert_complete(lab: Lab) -> None:
    """Every metric has one row a step, every step is there, and every rollout and token is there once."""
    (run_id,) = lab.run_ids()
    assert lab.state(run_id)["status"] == "finished"
    rows = lab.query("select name, step, count(*) from metrics group by all")
    assert {count for _, _, count in rows} == {1}, (SEED, [row for row in rows if row[2] != 1])
    steps = sorted(step for name, step, _ in rows if name == "reward/mean")
    assert steps == list(range(steps[0], steps[0] + STEPS)), SEED
    assert lab.query("select count(*), count(distinct (step, rollout_id)) from rollouts") == [(STEPS * 16, STEPS * 16)]
    ((tokens, distinct),) = lab.query("select count(*), count(distinct (step, rollout_id, position)) from tokens")
    assert tokens == distinct == lab.query("select sum(num_tokens) from rollouts")[0][0]
