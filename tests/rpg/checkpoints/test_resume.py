"""A run that was killed and went on is the run that was not, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from waiting import wait_for

from tests.rpg.tiny_run import assert_trained, finish, make_inputs, make_run, rows, start, train

STEPS = 30
CHANGES: dict[str, dict[str, Any]] = {
    "training": {
        "steps": STEPS,
        "checkpoint": {"every_steps": 2},
        "export_every_steps": 10,
        "entropy_coef": {"target": 0.5, "of": "entropy", "gain": 0.5},
    },
    "rollout": {"temperature": {"schedule": [[1, 1.0], [STEPS, 0.8]], "between": "linear"}},
    "reference": {"source": "snapshot", "update": {"every_steps": {"schedule": [[1, 2], [8, 4], [20, 3]]}}},
    "objective": {
        "kl_coef": {"target": 1e-3, "of": "kl/reverse", "start": 0.02, "gain": 0.5},
        "clip": {
            "type": "dual",
            "low": {"schedule": [[1, 0.01], [STEPS, 0.3]], "between": "linear"},
            "high": {"target": 0.05, "of": "clip_fraction/high", "gain": 1.0},
        },
    },
}
"""Values that change from the first step to the last, by schedules and by closed loops, so that a kill is always in the
middle of a change."""
VLLM = {**CHANGES, "rollout": {"engine": "vllm"}}
SEED = int(os.environ.get("RPG_KILL_SEED", random.SystemRandom().randrange(2**31)))
"""Seed of the moments; a failing test names it, and setting it gives the same moments again."""
MANY = int(os.environ.get("RPG_KILLS", "20"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory, head_dim=32)
    return directory


@pytest.fixture(scope="module")
def uninterrupted(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = make_run(inputs, tmp_path_factory.mktemp("runs") / "run", **CHANGES)
    train(run_dir)
    return run_dir


@pytest.mark.more
def test_three_kills_and_a_broken_checkpoint_change_nothing(inputs: Path, tmp_path: Path, uninterrupted: Path) -> None:
    run_dir = make_run(inputs, tmp_path / "run", **CHANGES)
    kill(run_dir, times=3)
    newest = max((run_dir / "checkpoints").glob("step-*"))
    broken = newest / "reference-rank00000.safetensors"
    content = broken.read_bytes()
    broken.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    output = train(run_dir)
    assert f"{newest} is broken (reference-rank00000.safetensors does not match its digest)" in output
    same_state(run_dir, uninterrupted)
    same_rows(run_dir, uninterrupted)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_kills_change_nothing(inputs: Path, tmp_path: Path, uninterrupted: Path) -> None:
    run_dir = make_run(inputs, tmp_path / "run", **CHANGES)
    kill(run_dir, times=MANY)
    train(run_dir)
    same_state(run_dir, uninterrupted)
    same_rows(run_dir, uninterrupted)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("zero_stage", range(4))
def test_state_that_leaves_the_device_while_sampling_comes_back_as_it_was(
    inputs: Path, tmp_path: Path, zero_stage: int
) -> None:
    stays = {"zero_stage": zero_stage, "precision": "bfloat16" if zero_stage > 1 else "float32"}
    leaves = {**stays, "offload": {"while_sampling": True}}
    straight, killed = (
        make_run(inputs, tmp_path / name / "run", **{**CHANGES, "training": {**CHANGES["training"], **training}})
        for name, training in (("straight", stays), ("killed", leaves))
    )
    train(straight)
    kill(killed, times=2)
    train(killed)
    same_state(killed, straight)
    same_rows(killed, straight)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(7200)
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_many_kills_of_a_run_with_vllm_change_nothing(inputs: Path, tmp_path: Path) -> None:
    straight, again, run_dir = (make_run(inputs, tmp_path / name / "run", **VLLM) for name in ("one", "two", "killed"))
    train(straight)
    train(again)
    if recorded(straight, "tokens") != recorded(again, "tokens"):
        pytest.skip("two runs that nobody killed differ: this build of vLLM is not reproducible")
    kill(run_dir, times=MANY)
    train(run_dir)
    same_state(run_dir, straight)
    same_rows(run_dir, straight)


def kill(run_dir: Path, *, times: int) -> None:
    """Starts the run and kills it, this many times, at random moments of its life."""
    chance = random.Random(SEED)
    # Early enough that the last one is killed before it is done.
    for after in sorted(chance.sample(range(1, STEPS - 3), times)):
        process = start([sys.executable, "-m", "rpg.train", str(run_dir)])
        wait_for_step(process, run_dir, after)
        time.sleep(chance.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        finish(process, expect=-signal.SIGKILL)


def wait_for_step(process: "subprocess.Popen[str]", run_dir: Path, step: int, *, saved: bool = False) -> None:
    """Until the step's metrics are on disk; `saved`: and a checkpoint, which is written beside the next steps."""

    def is_recorded() -> bool:
        if process.poll() is not None:
            finish(process)
        if saved and not any(run_dir.glob("checkpoints/step-*/manifest.json")):
            return False
        return any((run_dir / "segments" / "metrics").glob(f"*-s{step:06}-*.parquet"))

    wait_for(is_recorded, timeout=600, what=f"step {step}")


def same_state(run_dir: Path, other: Path) -> None:
    """Final parameters, optimizer, reference and exports are equal in every bit."""
    assert_trained(other)
    last = Path("checkpoints") / f"step-{STEPS:06}"
    state = [last / f"{stem}-rank00000.safetensors" for stem in ("learner", "reference")]
    exported = [f"weights/step-{step:06}/model.safetensors" for step in (10, 20, 30)]
    for file in (*state, *exported):
        one, two = load_file(run_dir / file), load_file(other / file)
        assert all(np.array_equal(one[name], two[name]) for name in one | two), file
    assert (run_dir / last / "trainer.json").read_text() == (other / last / "trainer.json").read_text()


def same_rows(run_dir: Path, other: Path) -> None:
    """Every valid row is there once, with the values of the uninterrupted run, except for times."""
    for table in ("metrics", "rollouts", "tokens"):
        resumed, uninterrupted = recorded(run_dir, table), recorded(other, table)
        assert len(resumed) == len(rows(run_dir, table)), ("doubled", SEED)
        assert resumed.keys() == uninterrupted.keys(), ("missing", SEED)
        assert resumed == uninterrupted, SEED


def recorded(run_dir: Path, table: str) -> dict[Any, dict[str, Any]]:
    """The valid rows by what tells them apart."""
    key = "name" if table == "metrics" else "rollout_id"
    return {(row["step"], row[key], row.get("position")): plain(row) for row in rows(run_dir, table)}


def plain(row: dict[str, Any]) -> dict[str, Any]:
    clocked = str(row.get("name", "")).startswith(("time/", "tokens_per_second/", "memory/"))
    left_out = {"attempt", "recorded_at"} | ({"value"} if clocked else set())
    return {name: value for name, value in row.items() if name not in left_out}
