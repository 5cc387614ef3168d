"""Sampling ahead of training: the weights of each batch, its records, and exact resumption.

With 2 batches ahead groups without variance are replaced as well, so that a batch takes as many prompts as it needs.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from pipelines.launchers.local import local_command
from tests.rpg.checkpoints.test_resume import recorded, same_rows
from tests.rpg.tiny_run import assert_trained, finish, free_port, make_run, rows, start, train

STEPS = 8
TRAINING: dict[str, Any] = {"steps": STEPS, "checkpoint": {"every_steps": 3, "keep_last": 9}}
ROLLOUTS: dict[int, dict[str, Any]] = {
    1: {"max_staleness": 1},
    2: {"max_staleness": 2, "dynamic_sampling": {"max_batches": 3}},
}


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Uninterrupted runs, by their staleness."""
    where = tmp_path_factory.mktemp("whole")
    runs = {staleness: new_run(inputs, where / str(staleness) / "run", staleness) for staleness in ROLLOUTS}
    for run_dir in runs.values():
        train(run_dir)
    return runs


def new_run(inputs: Path, where: Path, staleness: int) -> Path:
    return make_run(inputs, where, training=TRAINING, rollout=ROLLOUTS[staleness])


@pytest.mark.more
def test_each_batch_is_sampled_with_the_weights_that_the_rule_names(whole: dict[int, Path]) -> None:
    for staleness, run_dir in whole.items():
        rollouts = rows(run_dir, "rollouts")
        versions = {row["step"]: (row["policy_version"], row["trained_version"]) for row in rollouts}
        assert versions == {step: (max(0, step - 1 - staleness), step - 1) for step in range(1, STEPS + 1)}
        metrics = {(row["step"], row["name"]): row["value"] for row in rows(run_dir, "metrics")}
        expected = [min(step - 1, staleness) for step in range(1, STEPS + 1)]
        for name in ("staleness/mean", "staleness/max"):
            assert [metrics[step, name] for step in range(1, STEPS + 1)] == expected


def test_old_logprobs_are_the_samplers_and_the_ratio_is_taken_over_them(whole: dict[int, Path]) -> None:
    tokens = rows(whole[1], "tokens")
    assert all(row["old_logprob"] == row["rollout_logprob"] for row in tokens)
    for row in tokens:
        assert np.isclose(row["ratio"], np.exp(row["logprob"] - row["rollout_logprob"]), rtol=1e-5)
    first_minibatch = [row["ratio"] for row in tokens if row["step"] == STEPS and row["rollout_id"] < 16]
    assert max(abs(ratio - 1) for ratio in first_minibatch) > 1e-3


@pytest.mark.long
def test_runs_that_go_on_with_batches_waiting_are_the_uninterrupted_ones_bit_for_bit(
    inputs: Path, tmp_path: Path, whole: dict[int, Path]
) -> None:
    stopped = new_run(inputs, tmp_path / "stopped" / "run", 1)
    (stopped / "cancel").touch()
    train(stopped, expect=143)
    assert waiting(stopped, 1) == [2]
    crashed = new_run(inputs, tmp_path / "crashed" / "run", 2)
    for kept in ("segments", "attempts", "checkpoints/step-000003"):
        shutil.copytree(whole[2] / kept, crashed / kept)
    assert waiting(crashed, 3) == [4, 5]
    assert prompts_taken(crashed, 3) > 5 * 4, "prompts were taken in place of others, so the cursor counts no steps"
    train(stopped)
    train(crashed)
    same_training(stopped, whole[1])
    same_training(crashed, whole[2])


def waiting(run_dir: Path, step: int) -> list[int]:
    """Steps of the batches that the checkpoint after a step holds."""
    saved = torch.load(run_dir / f"checkpoints/step-{step:06}/rollouts-rank00000.pt", weights_only=True)
    return [batch["step"] for batch in saved]


def prompts_taken(run_dir: Path, step: int) -> int:
    """The data cursor of the checkpoint after a step."""
    return int(json.loads((run_dir / f"checkpoints/step-{step:06}/trainer.json").read_text())["position"])


def same_training(run_dir: Path, other: Path) -> None:
    """Final weights and optimizer, and every row, are equal in every bit."""
    assert_trained(other)
    state = Path("checkpoints") / f"step-{STEPS:06}" / "learner-rank00000.safetensors"
    mine, theirs = (load_file(run / state) for run in (run_dir, other))
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine | theirs)
    same_rows(run_dir, other)


@pytest.mark.long
def test_two_ranks_train_on_the_rollouts_of_one(inputs: Path, tmp_path: Path, whole: dict[int, Path]) -> None:
    run_dir = make_run(inputs, tmp_path / "ranks", training={"steps": 3, "ranks": 2}, rollout={"max_staleness": 1})
    train(run_dir, ranks=2)
    alone, together = (
        {(row["step"], row["rollout_id"]): row for row in rows(run, "rollouts")} for run in (whole[1], run_dir)
    )
    for key in [key for key in together if key[0] <= 2]:  # later ones follow from sums in another order
        assert alone[key]["response"] == together[key]["response"]
        assert alone[key]["policy_version"] == together[key]["policy_version"] == 0
    alone, together = (
        {(row["step"], row["name"]): row["value"] for row in rows(run, "metrics")} for run in (whole[1], run_dir)
    )
    for name in ("reward/mean", "kl/reverse", "kl/behaviour", "grad_norm", "ratio/mean", "staleness/mean"):
        assert np.isclose(alone[2, name], together[2, name], rtol=1e-4, atol=1e-7), name


@pytest.mark.long
def test_a_run_goes_on_with_other_numbers_of_ranks_and_the_batches_that_wait(
    inputs: Path, tmp_path: Path, whole: dict[int, Path]
) -> None:
    run_dir = new_run(inputs, tmp_path / "run", 1)
    file = run_dir / "inputs.json"
    alone = [sys.executable, "-m", "rpg.train", str(run_dir)]
    for until, command in ((3, alone), (6, local_command(run_dir, 2, free_port())), (0, alone)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"until": until}))
        finish(start(command))
    for table in ("rollouts", "tokens"):
        changed, straight = (recorded(run, table) for run in (run_dir, whole[1]))
        assert len(changed) == len(rows(run_dir, table)), "doubled"
        assert {step for step, *_ in changed} == {step for step, *_ in straight}
        sampled = ("token_id", "rollout_logprob") if table == "tokens" else ("response", "reward", "policy_version")
        for key in [key for key in straight if key[0] <= 4]:  # the last was sampled by one rank, trained on by two
            assert [changed[key][name] for name in sampled] == [straight[key][name] for name in sampled]
