"""Training that evaluates during training, pauses and continues gives the same bits as training that does not."""

import json
import signal
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from specs.machine.exit_cause import STOPPED
from tests.rpg.stage_jobs import run_stage
from tests.rpg.tiny_run import PROBLEMS, finish, make_inputs, make_run, rows, start, start_anew, train
from tests.rpg.train_worker import continued

STEPS = 8
SAMPLES = 4
TRAINING = {"steps": STEPS, "checkpoint": {"every_steps": 3}}
DATA = {"evaluation": [{"source": "parquet", "name": "held_out", "path": "held_out.parquet"}]}
EVALUATION = {"samples_per_problem": SAMPLES, "max_response_length": 12}
"""Longer responses than those of training, which are of 8 tokens."""
ROLLOUT = {"max_concurrent": 32}
"""Requests, as many as a step has responses; an evaluation answers eight times as many between two progress lines."""
CHANGES: dict[str, dict[str, Any]] = {
    "training": TRAINING,
    "data": DATA,
    "evaluation": EVALUATION,
    "rollout": ROLLOUT,
}
EVERY_TWO = {**CHANGES, "evaluation": {**EVALUATION, "every_steps": 2}}
BOTH = {"without": CHANGES, "with": EVERY_TWO}
TWO_RANKS = {name: {**changes, "training": {**TRAINING, "ranks": 2}} for name, changes in BOTH.items()}


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


@pytest.fixture(scope="module")
def evaluating(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that evaluates every two steps, exports the weights that it has half-way, and keeps the best."""
    saved = {"every_steps": 2, "keep_last": 1, "keep_best": {"accuracy_on": "held_out"}}
    exporting = {"training": {**TRAINING, "export_every_steps": 4, "checkpoint": saved}}
    run_dir = new_run(inputs, tmp_path_factory.mktemp("runs") / "run", **EVERY_TWO | exporting)
    train(run_dir)
    return run_dir


def new_run(inputs: Path, run_dir: Path, **changes: dict[str, Any]) -> Path:
    """A run's directory that names the evaluate stage, without which training evaluates nothing."""
    make_run(inputs, run_dir, **changes)
    set_inputs(run_dir, evaluation="e" * 64)
    return run_dir


def set_inputs(run_dir: Path, **fields: Any) -> None:
    file = run_dir / "inputs.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def train_until(run_dir: Path, step: int) -> str:
    set_inputs(run_dir, until=step)
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


@pytest.mark.long
def test_a_run_that_pauses_twice_and_goes_on_is_the_uninterrupted_one(
    inputs: Path, tmp_path: Path, straight: Path
) -> None:
    run_dir = new_run(inputs, tmp_path / "run", **CHANGES)
    train_until(run_dir, 4)
    noted = json.loads((run_dir / "evaluated.json").read_text())
    assert (noted["evaluation"], *noted["accuracies"]) == ("e" * 64, "4")
    assert not (run_dir / "train.json").exists()
    train_until(run_dir, 5)
    train_until(run_dir, 0)
    assert_trained_alike(run_dir, straight)
    assert evaluated(run_dir) == dict.fromkeys((4, 5), 5 * SAMPLES)
    assert {row["fingerprint"] for row in rows(run_dir, "evaluations")} == {"e" * 64}
    attempts = [json.loads(path.read_text()) for path in sorted((run_dir / "attempts").glob("*.json"))]
    assert [attempt["resumed_from_step"] for attempt in attempts] == [0, 4, 5]


@pytest.mark.more
def test_evaluation_on_the_way_changes_nothing_in_training(evaluating: Path, straight: Path) -> None:
    assert_trained_alike(evaluating, straight)
    assert evaluated(evaluating) == dict.fromkeys((2, 4, 6), 5 * SAMPLES)
    timed = {row["step"] for row in rows(evaluating, "metrics") if row["name"] == "time/evaluate"}
    assert timed == {2, 4, 6}


@pytest.mark.long
def test_killed_while_it_evaluates_a_run_goes_on_with_every_row_once(
    inputs: Path, tmp_path: Path, straight: Path
) -> None:
    # So many that two problems are answered at a time, and there are moments in the middle of an evaluation.
    samples = 128
    many = {"evaluation": {**EVERY_TWO["evaluation"], "samples_per_problem": samples}}
    run_dir = new_run(inputs, tmp_path / "run", **CHANGES | many)
    for lines in (2, 5):
        process = start_anew([sys.executable, "-m", "rpg.train", str(run_dir)])
        assert process.stdout is not None
        answered = (line for line in process.stdout if "problems answered" in line)
        for _ in range(lines):
            assert next(answered)
        process.send_signal(signal.SIGKILL)
        finish(process, expect=-signal.SIGKILL)
    train(run_dir)
    assert evaluated(run_dir) == dict.fromkeys((2, 4, 6), 5 * samples)
    assert_trained_alike(run_dir, straight)


@pytest.mark.more
def test_a_plateau_moves_the_reference_and_a_run_that_goes_on_does_as_one_that_did_not_stop(
    inputs: Path, tmp_path: Path
) -> None:
    following = {
        "training": {**TRAINING, "steps": STEPS, "checkpoint": {"every_steps": 2}},
        "evaluation": {**EVALUATION, "every_steps": 1},
        "reference": {"source": "snapshot", "update": {"plateau": 2, "reset_optimizer": True}},
    }
    straight = new_run(inputs, tmp_path / "straight", **{**CHANGES, **following})
    train(straight)
    again = continued(straight, tmp_path / "again")
    train(again)
    assert_trained_alike(again, straight)
    moved = [row["message"] for row in rows(straight, "events") if row["kind"] == "reference_moved"]
    assert moved
    assert all(message.endswith("2 evaluations without a gain") for message in moved), moved


@pytest.mark.long
def test_asked_to_stop_before_an_evaluation_a_run_evaluates_when_it_goes_on(
    inputs: Path, tmp_path: Path, straight: Path
) -> None:
    every = {"evaluation": {**EVALUATION, "every_steps": 1}}
    run_dir = new_run(inputs, tmp_path / "run", **CHANGES | every)
    (run_dir / "cancel").touch()  # makes it stop after its first step, which is then due
    train(run_dir, expect=STOPPED)
    assert evaluated(run_dir) == {}
    train(run_dir)
    assert evaluated(run_dir) == dict.fromkeys(range(1, STEPS), 5 * SAMPLES)
    assert_trained_alike(run_dir, straight)


@pytest.mark.long
def test_set_back_a_run_evaluates_later_steps_again(inputs: Path, tmp_path: Path, straight: Path) -> None:
    keeping = {"training": {**TRAINING, "checkpoint": {"every_steps": 3, "keep_last": 9}}}
    run_dir = new_run(inputs, tmp_path / "run", **EVERY_TWO | keeping)
    program = "import sys, pathlib; from tests.rpg.set_back import main; main(pathlib.Path(sys.argv[1]))"
    finish(start([sys.executable, "-c", program, str(run_dir)]))
    attempts = [json.loads(path.read_text()) for path in sorted((run_dir / "attempts").glob("*.json"))]
    assert [attempt["resumed_from_step"] for attempt in attempts] == [0, 3]
    assert evaluated(run_dir) == dict.fromkeys((2, 4, 6), 5 * SAMPLES), "it was at step 7 before, evaluated"
    assert json.loads((run_dir / "evaluated.json").read_text())["accuracies"].keys() == {"2", "4", "6"}
    assert_trained_alike(run_dir, straight)


def test_the_most_accurate_checkpoint_and_its_weights_are_kept(evaluating: Path) -> None:
    measured = {
        row["step"]: row["value"] for row in rows(evaluating, "evaluations") if row["metric"] == f"mean@{SAMPLES}"
    }
    assert len(set(measured.values())) > 1, "there is a best to choose"
    best = max(measured, key=lambda step: (measured[step], step))
    assert steps_of(evaluating / "checkpoints") == {best, STEPS}
    assert steps_of(evaluating / "weights") == {4, best, STEPS}, "4 is exported in any case"
    noted = json.loads((evaluating / "evaluated.json").read_text())["accuracies"]
    assert noted == {str(step): {"held_out": accuracy} for step, accuracy in measured.items()}


def steps_of(directory: Path) -> set[int]:
    return {int(path.name.removeprefix("step-")) for path in directory.glob("step-*")}


@pytest.mark.long
def test_a_step_evaluated_after_its_checkpoint_was_saved_is_the_best_if_it_was_better(
    inputs: Path, tmp_path: Path
) -> None:
    saved = {"every_steps": 1, "keep_last": 1, "keep_best": {"accuracy_on": "held_out"}}
    changes = {
        "training": {**TRAINING, "steps": 3, "checkpoint": saved},
        "evaluation": {**EVALUATION, "every_steps": 1},
    }
    run_dir = new_run(inputs, tmp_path / "run", **CHANGES | changes)
    (run_dir / "cancel").touch()
    train(run_dir, expect=STOPPED)
    (run_dir / "cancel").unlink(missing_ok=True)
    train(run_dir)
    noted = json.loads((run_dir / "evaluated.json").read_text())["accuracies"]
    best = max((measured["held_out"], int(step)) for step, measured in noted.items())[1]
    assert set(noted) == {"1", "2"}
    assert steps_of(run_dir / "checkpoints") == steps_of(run_dir / "weights") == {best, 3}


def test_the_rows_are_those_of_the_evaluate_stage_for_the_same_weights(
    inputs: Path, tmp_path: Path, evaluating: Path
) -> None:
    spec = json.loads((evaluating / "spec.json").read_text())
    spec["evaluation"]["checkpoints"] = "all"
    stage = run_stage("evaluate", tmp_path, spec, data=inputs / "data", base=inputs / "base", run=evaluating)
    assert stage.code == 0, stage.log
    summary = json.loads((stage.out / "summary.json").read_text())["checkpoints"]
    assert [checkpoint["step"] for checkpoint in summary] == [0, 4, STEPS], "what every setting exports, not the best"
    for table in ("evaluations", "evaluation_samples"):
        measured = [plain(row) for row in rows(evaluating, table) if row["step"] == 4]
        (file,) = (stage.out / "segments" / table).glob("a0001-s000004-*.parquet")
        assert measured == [plain(row) for row in pq.read_table(file).to_pylist()]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("run_id", "fingerprint", "attempt")}


@pytest.mark.long
def test_two_ranks_share_the_problems_and_train_as_if_they_did_not(inputs: Path, tmp_path: Path) -> None:
    runs = [new_run(inputs, tmp_path / name / "run", **changes) for name, changes in TWO_RANKS.items()]
    for run_dir in runs:
        train(run_dir, ranks=2)
    assert_trained_alike(*runs)
    assert evaluated(runs[0]) == {}
    assert evaluated(runs[1]) == dict.fromkeys((2, 4, 6), 5 * SAMPLES)


@pytest.mark.long
def test_batches_sampled_ahead_are_those_without_evaluation(inputs: Path, tmp_path: Path) -> None:
    ahead = {"rollout": {**ROLLOUT, "max_staleness": 2}}
    runs = [new_run(inputs, tmp_path / name / "run", **spec | ahead) for name, spec in BOTH.items()]
    for run_dir in runs:
        train(run_dir)
    assert_trained_alike(*runs)
    assert evaluated(runs[1]) == dict.fromkeys((2, 4, 6), 5 * SAMPLES)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_vllm_engine_evaluates_and_samples_on_as_if_it_had_not(inputs: Path, tmp_path: Path) -> None:
    vllm = {"rollout": {**ROLLOUT, "engine": "vllm"}}
    runs = [new_run(inputs, tmp_path / name / "run", **spec | vllm) for name, spec in BOTH.items()]
    for run_dir in runs:
        train(run_dir)
    assert_trained_alike(*runs)
    assert evaluated(runs[1]) == dict.fromkeys((2, 4, 6), 5 * SAMPLES)
