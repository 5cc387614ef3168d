"""Training that evaluates on its way, pauses and goes on is training that does not, bit for bit."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from tests.rpg.tiny_run import PROBLEMS, make_inputs, make_run, rows, train

STEPS = 8
SAMPLES = 4
TRAINING = {"steps": STEPS, "checkpoint": {"every_steps": 3}}
DATA = {"evaluation": [{"source": "parquet", "name": "held_out", "path": "held_out.parquet"}]}
EVALUATION = {"samples_per_problem": SAMPLES, "max_response_length": 12}
"""Longer responses than those of training, which are of 8 tokens."""
CHANGES: dict[str, dict[str, Any]] = {"training": TRAINING, "data": DATA, "evaluation": EVALUATION}
EVERY_TWO = {**CHANGES, "evaluation": {**EVALUATION, "every_steps": 2}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data, with an evaluation set beside the training set."""
    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory, head_dim=32)
    asked = [
        {"problem_id": f"e{i}", "prompt": prompt, "answer": prompt[0], "dataset": "held_out", "metadata": "{}"}
        for i, prompt in enumerate(PROBLEMS[:5])
    ]
    pq.write_table(pa.Table.from_pylist(asked), directory / "data" / "evaluation.parquet")
    return directory


@pytest.fixture(scope="module")
def straight(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that neither pauses nor evaluates."""
    run_dir = make_run(inputs, tmp_path_factory.mktemp("runs") / "run", **CHANGES)
    train(run_dir)
    return run_dir


def train_until(run_dir: Path, step: int) -> str:
    file = run_dir / "inputs.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"until": step, "evaluation": "e" * 64}))
    return train(run_dir)


def weights(run_dir: Path) -> dict[str, Any]:
    return dict(load_file(run_dir / f"weights/step-{STEPS:06}/model.safetensors"))


def assert_trained_alike(run_dir: Path, other: Path) -> None:
    """Weights, and every metric that is no measurement of time or memory."""
    one, two = weights(run_dir), weights(other)
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert metrics(run_dir) == metrics(other)


def metrics(run_dir: Path) -> dict[tuple[int, str], float]:
    clocked = ("time/", "tokens_per_second/", "memory/")
    recorded = [row for row in rows(run_dir, "metrics") if not row["name"].startswith(clocked)]
    by_name = {(row["step"], row["name"]): row["value"] for row in recorded}
    assert len(by_name) == len(recorded), "doubled"
    return by_name


def evaluated(run_dir: Path) -> dict[int, int]:
    """Step -> responses recorded; each problem's and sample's once."""
    samples = rows(run_dir, "evaluation_samples")
    keys = Counter((row["step"], row["problem_id"], row["sample"]) for row in samples)
    assert set(keys.values()) <= {1}, "doubled"
    assert {row["step"] for row in rows(run_dir, "evaluations")} == {row["step"] for row in samples}
    return dict(Counter(row["step"] for row in samples))


def test_a_run_that_pauses_twice_and_goes_on_is_the_uninterrupted_one(
    inputs: Path, tmp_path: Path, straight: Path
) -> None:
    run_dir = make_run(inputs, tmp_path / "run", **CHANGES)
    train_until(run_dir, 4)
    assert json.loads((run_dir / "paused.json").read_text()) == {
        "step": 4,
        "fingerprint": "f" * 64,
        "evaluation": "e" * 64,
    }
    assert not (run_dir / "train.json").exists()
    train_until(run_dir, 5)
    train_until(run_dir, 0)
    assert_trained_alike(run_dir, straight)
    assert evaluated(run_dir) == dict.fromkeys((4, 5), 5 * SAMPLES)
    assert {row["fingerprint"] for row in rows(run_dir, "evaluations")} == {"e" * 64}
    attempts = [json.loads(path.read_text()) for path in sorted((run_dir / "attempts").glob("*.json"))]
    assert [attempt["resumed_from_step"] for attempt in attempts] == [0, 4, 5]


def test_evaluation_on_the_way_changes_nothing_in_training(inputs: Path, tmp_path: Path, straight: Path) -> None:
    run_dir = make_run(inputs, tmp_path / "run", **EVERY_TWO)
    train(run_dir)
    assert_trained_alike(run_dir, straight)
    assert evaluated(run_dir) == dict.fromkeys((2, 4, 6), 5 * SAMPLES)
    timed = {row["step"] for row in rows(run_dir, "metrics") if row["name"] == "time/evaluate"}
    assert timed == {2, 4, 6}
