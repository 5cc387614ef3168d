"""`kill -9` at any moment: nothing lives on, the next `rpg run` finishes, and no row is missing or doubled."""

import os
import random
import time

import psutil
import pytest
from live import Lab, finished, kill
from waiting import wait_for

STEPS = 30
OVERRIDES = (f"training.steps={STEPS}", "training.checkpoint.every_steps=4")
NO_RETRY = (*OVERRIDES, "stages.train.retries=0")
SEED = int(os.environ.get("RPG_KILL_SEED", random.SystemRandom().randrange(2**31)))
"""Seed of the moments; a failing test names it, and setting it gives the same moments again."""

ten = pytest.mark.parametrize("number", range(10))


@pytest.mark.more
def test_a_flow_killed_while_it_trains_leaves_nothing_and_the_next_run_finishes(lab):
    kill_the_flow(lab, 1)
    assert_next_run_finishes(lab, OVERRIDES)


@pytest.mark.long
def test_a_trainer_killed_three_times_leaves_nothing_and_the_next_run_finishes(lab):
    for number in range(3):
        kill_the_trainer(lab, number)
    assert_next_run_finishes(lab, NO_RETRY)


@pytest.mark.long
def test_a_killed_trainer_is_started_again_by_the_same_run(lab):
    run = lab.start("run", str(lab.spec), overrides=(*OVERRIDES, "stages.train.retry_delay_seconds=0"))
    pid = wait_for(lambda: lab.training_pid() or run.poll(), what="the trainer")
    wait_for(lambda: lab.progress(lab.run_ids()[0]) or run.poll() is not None, what="a step")
    kill(pid)
    result = finished(run)
    assert result.code == 0, result.err
    assert "retrying in 0 s: train was killed by SIGKILL" in result.err
    assert_complete(lab)


@pytest.mark.long
@ten
def test_a_killed_flow_leaves_nothing_and_the_next_run_finishes(lab, number):
    kill_the_flow(lab, number)
    assert_next_run_finishes(lab, OVERRIDES)


@pytest.mark.long
@ten
def test_a_killed_trainer_leaves_nothing_and_the_next_run_finishes(lab, number):
    kill_the_trainer(lab, number)
    assert_next_run_finishes(lab, NO_RETRY)


def kill_the_flow(lab: Lab, number: int) -> None:
    """Any time from the server's start to the last stage."""
    moments = random.Random(f"{SEED} flow {number}")
    run = lab.start("run", str(lab.spec), overrides=OVERRIDES)
    if number % 3 == 0:
        time.sleep(moments.uniform(0, 8))
    else:
        wait_for(lambda: lab.training_pid() or run.poll() is not None, what="the trainer")
        time.sleep(moments.uniform(0, 12))
    if run.poll() is None:  # else it had finished by then, and nothing is left of it either
        kill(run.pid)
    run.communicate()
    assert_dead_in_time(lab)


def kill_the_trainer(lab: Lab, number: int) -> None:
    """Any time of its life; the launcher or the rank under it."""
    moments = random.Random(f"{SEED} trainer {number}")
    run = lab.start("run", str(lab.spec), overrides=NO_RETRY)
    pid = wait_for(lambda: lab.training_pid() or run.poll() is not None, what="the trainer")
    if run.poll() == 0:
        return  # An earlier kill came after the last step.
    time.sleep(moments.uniform(0, 12))
    try:
        ranks = psutil.Process(pid).children()
        kill(moments.choice([pid, *(rank.pid for rank in ranks)]))
    except (psutil.Error, ProcessLookupError):
        pass  # It was done already: then there is nothing to lose.
    wait_for(lambda: not lab.training_pid(), timeout=10, what=f"the trainer's end, seed {SEED}")
    # The flow has to record the failure; were the trainer done before the kill, there would be an evaluation to finish.
    failed = finished(run).code == 1
    assert_dead_in_time(lab)
    assert failed or lab.state(lab.run_ids()[0])["status"] == "finished", SEED


def assert_dead_in_time(lab: Lab) -> None:
    """Ten seconds after the kill no process of the run lives, the API server included."""
    wait_for(lambda: not lab.processes(), timeout=10, what="the end of all processes")


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
