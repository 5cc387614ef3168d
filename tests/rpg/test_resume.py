"""A run that was killed and went on is the run that was not, bit for bit."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.rpg.tiny_run import finish, make_inputs, make_run, rows, start, train

STEPS = 14
TRAINING = {"steps": STEPS, "checkpoint": {"every_steps": 2}, "export_every_steps": 5}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory)
    return directory


@pytest.fixture(scope="module")
def uninterrupted(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = make_run(inputs, tmp_path_factory.mktemp("runs") / "run", training=TRAINING)
    train(run_dir)
    return run_dir


def test_three_kills_and_a_broken_checkpoint_change_nothing(inputs: Path, tmp_path: Path, uninterrupted: Path) -> None:
    run_dir = make_run(inputs, tmp_path / "run", training=TRAINING)
    chance = random.Random(time.time_ns())
    for after in (5, 8, 11):
        process = start([sys.executable, "-m", "rpg.train", str(run_dir)])
        wait_for_step(process, run_dir, after)
        time.sleep(chance.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        finish(process, expect=-signal.SIGKILL)
    newest = max((run_dir / "checkpoints").glob("step-*"))
    broken = newest / "reference-rank00000.safetensors"
    content = broken.read_bytes()
    broken.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said = train(run_dir)
    assert f"{newest} is broken (reference-rank00000.safetensors does not match its digest)" in said
    same_state(run_dir, uninterrupted)
    same_rows(run_dir, uninterrupted)


def wait_for_step(process: "subprocess.Popen[str]", run_dir: Path, step: int) -> None:
    """Until the step's metrics are on disk."""
    while not list((run_dir / "segments" / "metrics").glob(f"*-s{step:06}-*.parquet")):
        if process.poll() is not None:
            finish(process)
        time.sleep(0.005)


def same_state(run_dir: Path, other: Path) -> None:
    """Final parameters, optimizer, reference and exports are equal in every bit."""
    last = Path("checkpoints") / f"step-{STEPS:06}"
    state = [last / f"{stem}-rank00000.safetensors" for stem in ("learner", "reference")]
    exported = [f"weights/step-{step:06}/model.safetensors" for step in (5, 10, 14)]
    for file in (*state, *exported):
        one, two = load_file(run_dir / file), load_file(other / file)
        assert all(np.array_equal(one[name], two[name]) for name in one | two), file
    assert (run_dir / last / "trainer.json").read_text() == (other / last / "trainer.json").read_text()


def same_rows(run_dir: Path, other: Path) -> None:
    """Every valid row is there once, with the values of the uninterrupted run; the clock's figures aside."""
    for table, key in (("metrics", "name"), ("rollouts", "rollout_id"), ("tokens", "rollout_id")):
        mine, theirs = (
            {(row["step"], row[key], row.get("position")): plain(row) for row in rows(run, table)}
            for run in (run_dir, other)
        )
        assert len(mine) == len(rows(run_dir, table)), "doubled"
        assert mine.keys() == theirs.keys(), "missing"
        assert mine == theirs


def plain(row: dict[str, Any]) -> dict[str, Any]:
    clocked = str(row.get("name", "")).startswith(("time/", "tokens_per_second/", "memory/"))
    left_out = {"attempt", "recorded_at"} | ({"value"} if clocked else set())
    return {name: value for name, value in row.items() if name not in left_out}
