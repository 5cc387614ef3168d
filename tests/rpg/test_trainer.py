"""The trainer process, from a run's directory to its records."""

import json
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from pipelines.launchers.local import local_command
from specs.metrics import METRICS
from tests.rpg.tiny_run import finish, free_port, make_run, rows, start, train


def described(*parts: str) -> set[str]:
    """The metrics that are recorded always, and with these parts of a spec."""
    return {metric.name for metric in METRICS if metric.recorded_with in ("", *parts)}


@pytest.fixture(scope="module")
def trained(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run_dir = make_run(inputs, tmp_path_factory.mktemp("runs") / "whole")
    return run_dir, train(run_dir)


@pytest.mark.more
def test_every_step_records_the_same_metrics_once_and_none_that_is_not_described(trained: tuple[Path, str]) -> None:
    names = defaultdict(set)
    for row in rows(trained[0], "metrics"):
        assert row["name"] not in names[row["step"]], "recorded twice"
        names[row["step"]].add(row["name"])
    assert set(names) == set(range(1, 7))
    assert all(recorded == names[1] <= described() for recorded in names.values())


def test_the_metrics_that_are_described_are_recorded_and_those_of_optional_parts_with_them(
    inputs: Path, tmp_path: Path
) -> None:
    training = {"steps": 1, "skip_zero_advantage": True}
    rollout = {"dynamic_sampling": {"max_batches": 2}}
    # A divergence in the loss gives every token a gradient: nothing could be skipped.
    run_dir = make_run(inputs, tmp_path / "run", training=training, rollout=rollout, objective={"kl_coef": 0})
    train(run_dir)
    recorded = {row["name"] for row in rows(run_dir, "metrics")}
    assert recorded == described("rollout.dynamic_sampling", "training.skip_zero_advantage")


def test_the_records_agree_with_each_other_and_with_what_was_printed(trained: tuple[Path, str]) -> None:
    run_dir, said = trained
    metrics = {(row["step"], row["name"]): row["value"] for row in rows(run_dir, "metrics")}
    rollouts = [row for row in rows(run_dir, "rollouts") if row["step"] == 4]
    tokens = [row for row in rows(run_dir, "tokens") if row["step"] == 4]
    assert len(rollouts) == 32
    assert np.isclose(metrics[4, "reward/mean"], np.mean([row["reward"] for row in rollouts]))
    assert f"step 4/6  reward {metrics[4, 'reward/mean']:.4g}" in said
    for rollout in rollouts:
        mine = [row for row in tokens if row["rollout_id"] == rollout["rollout_id"]]
        assert [row["position"] for row in mine] == list(range(rollout["num_tokens"]))
        assert rollout["policy_version"] == 3
        assert rollout["reference_version"] == 1
    for row in tokens:
        assert abs(row["rollout_logprob"] - row["old_logprob"]) < 1e-4, "the sampler and the learner are one policy"
        assert np.isclose(row["ratio"], np.exp(row["logprob"] - row["old_logprob"]), rtol=1e-5)
        assert row["clipped"] is not None
    means = np.mean([row["advantage"] for row in rollouts if row["group_id"] == 2])
    assert abs(means) < 1e-6


def test_the_first_minibatch_is_on_policy_and_the_second_is_not(trained: tuple[Path, str]) -> None:
    tokens = [row for row in rows(trained[0], "tokens") if row["step"] == 6]
    first = [row["ratio"] for row in tokens if row["rollout_id"] < 16]
    second = [row["ratio"] for row in tokens if row["rollout_id"] >= 16]
    assert set(first) == {1.0}
    assert any(ratio != 1.0 for ratio in second)


def test_the_reference_moves_when_its_schedule_says_so(trained: tuple[Path, str]) -> None:
    metrics = {(row["step"], row["name"]): row["value"] for row in rows(trained[0], "metrics")}
    assert [metrics[step, "reference/version"] for step in range(1, 7)] == [0, 0, 0, 1, 1, 1]
    assert [metrics[step, "reference/age_steps"] for step in range(1, 7)] == [0, 1, 2, 0, 1, 2]
    assert metrics[3, "kl/reverse"] > metrics[4, "kl/reverse"] >= 0
    moved = [row["step"] for row in rows(trained[0], "events") if row["kind"] == "reference_moved"]
    assert moved == [3, 6]


def test_the_exported_policy_loads_in_transformers(trained: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    manifest = json.loads((trained[0] / "train.json").read_text())
    assert manifest["weights"] == {"6": "weights/step-000006"}
    where = trained[0] / manifest["weights"]["6"]
    model = AutoModelForCausalLM.from_pretrained(where)
    assert model.config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(where)("01=")["input_ids"] == [2, 3, 4]


def test_a_trained_run_is_not_trained_again(trained: tuple[Path, str]) -> None:
    assert "is trained already" in train(trained[0])


@pytest.mark.more
@pytest.mark.parametrize("shared", [1, pytest.param(2, marks=pytest.mark.long)])
def test_two_ranks_train_under_the_launcher(
    inputs: Path, tmp_path: Path, trained: tuple[Path, str], shared: int
) -> None:
    """Each on sequences of its own, or both on every sequence."""
    run_dir = make_run(inputs, tmp_path / "two", training={"steps": 6, "ranks": 2, "sequence_parallel_size": shared})
    finish(start(local_command(run_dir, 2, free_port())))
    one = {(row["step"], row["name"]): row["value"] for row in rows(trained[0], "metrics")}
    two = {(row["step"], row["name"]): row["value"] for row in rows(run_dir, "metrics")}
    for name in ("reward/mean", "kl/reverse", "entropy", "grad_norm", "ratio/mean", "loss", "weight/variance"):
        assert np.isclose(one[1, name], two[1, name], rtol=1e-4, atol=1e-7), name
    tokens = [row for row in rows(run_dir, "tokens") if row["step"] == 1]
    assert all(row["logprob"] is not None and row["ref_logprob"] is not None for row in tokens)
    alone, together = (
        {row["rollout_id"]: row["response"] for row in rows(run, "rollouts") if row["step"] == 1}
        for run in (trained[0], run_dir)
    )
    assert alone == together
    for table in ("rollouts", "tokens"):
        written = sorted(path.name[:32] for path in (run_dir / "segments" / table).iterdir())
        assert written == [f"a0001-s{s:06}-{s:06}-r{r:04}of0002" for s in range(1, 7) for r in range(2)]


@pytest.mark.parametrize("how", ["signal", "file"])
def test_a_trainer_that_is_asked_to_stop_saves_its_state_and_can_go_on(inputs: Path, tmp_path: Path, how: str) -> None:
    run_dir = make_run(inputs, tmp_path / how, training={"steps": 400, "checkpoint": {"every_steps": 1000}})
    process = start([sys.executable, "-m", "rpg.train", str(run_dir)])
    wait_for(run_dir / "segments" / "metrics")
    if how == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        (run_dir / "cancel").touch()
    finish(process, expect=143)
    assert not (run_dir / "cancel").exists()
    (saved,) = (run_dir / "checkpoints").glob("step-*")
    assert max(row["step"] for row in rows(run_dir, "metrics")) == int(saved.name.removeprefix("step-"))


def test_a_gradient_that_is_no_number_ends_the_run_with_the_step_and_the_figure(inputs: Path, tmp_path: Path) -> None:
    changes = {"optimizer": {"learning_rate": 1e30, "max_grad_norm": 1e30}, "schedule": {"type": "constant"}}
    run_dir = make_run(inputs, tmp_path / "nan", training=changes, reference={"source": "behaviour", "update": None})
    said = train(run_dir, expect=1)
    assert "the gradient norm is nan" in said
    assert "Traceback" not in said
    assert [row["kind"] for row in rows(run_dir, "events")] == ["started", "failed"]


def test_a_response_longer_than_the_context_is_the_users_error(inputs: Path, tmp_path: Path) -> None:
    run_dir = make_run(inputs, tmp_path / "context", rollout={"max_response_length": 30})
    said = train(run_dir, expect=2)
    (problem,) = json.loads((run_dir / "problems.json").read_text())
    assert problem["path"] == ["rollout", "max_response_length"]
    assert problem["message"] == "the model's context is too short for the longest prompt and a whole response"
    assert (problem["given"], problem["allowed"]) == ("6 + 30 tokens", "32 tokens")
    assert "Traceback" not in said


def wait_for(path: Path) -> None:
    """Until a directory has something in it."""
    deadline = time.monotonic() + 60
    while not (path.is_dir() and any(path.glob("*.parquet"))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
