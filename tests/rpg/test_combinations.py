"""Sampling ahead, adapters and Schedule-Free AdamW with a vLLM engine: the weights that sample each batch, and exact
resumption of a killed run."""

import json
import signal
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rpg.checkpoints.test_resume import wait_for_step
from tests.rpg.checkpoints.test_trained_weights import furthest, logprobs_of
from tests.rpg.rollouts.test_staleness import STEPS, same_training
from tests.rpg.tiny_run import finish, make_inputs, make_run, rows, start, train

LORA = {"lora": {"rank": 4, "alpha": 8.0}}
FREE = {"optimizer": {"type": "schedule_free_adamw", "learning_rate": 0.03}}
REFILLED = {"dynamic_sampling": {"max_batches": 3}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ahead-1": ({}, {"max_staleness": 1}),
    "ahead-2": ({}, {"max_staleness": 2}),
    "lora": (LORA, {}),
    "free": (FREE, {}),
    "lora-free-ahead-2-refilled": (LORA | FREE, {"max_staleness": 2} | REFILLED),
    "lora-ahead-1-dedicated": (LORA, {"max_staleness": 1, "placement": "dedicated"}),
}
"""What differs in the training and in the rollout section."""
TRAINING = {
    **{"steps": STEPS, "export_every_steps": 1, "checkpoint": {"every_steps": 2, "keep_last": 9}},
    **{"schedule": {"type": "constant"}, "optimizer": {"learning_rate": 0.03}},
}
TOLERANCE = 1e-4
"""Nats, between two implementations of one policy in float32."""
ROLLOUT = {"engine": "vllm", "cpu_cache_gib": 0.25, "sentinel_tolerance": TOLERANCE}
KILLED_AFTER = 5
"""A step whose end proves that a checkpoint is there: the one of step 4 is begun when that of step 2 is done."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]


@dataclass(frozen=True)
class Run:
    """An uninterrupted run of a case."""

    case: str
    path: Path
    inputs: Path
    staleness: int


def new_run(inputs: Path, path: Path, case: str) -> Path:
    training, rollout = CASES[case]
    return make_run(inputs, path, training=TRAINING | training, rollout=ROLLOUT | rollout)


@pytest.fixture(scope="module", params=CASES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    inputs = tmp_path_factory.mktemp("inputs")
    make_inputs(inputs, head_dim=32)
    path = new_run(inputs, inputs / "whole" / "run", request.param)
    train(path)
    return Run(request.param, path, inputs, CASES[request.param][1].get("max_staleness", 0))


def sampling_version(step: int, staleness: int) -> int:
    return max(0, step - 1 - staleness)


def test_records_name_the_policy_that_sampled_and_the_one_that_was_trained(whole: Run) -> None:
    versions = {(row["step"], row["policy_version"], row["trained_version"]) for row in rows(whole.path, "rollouts")}
    steps = range(1, STEPS + 1)
    assert versions == {(step, sampling_version(step, whole.staleness), step - 1) for step in steps}
    oldest = [row["value"] for row in rows(whole.path, "metrics") if row["name"] == "staleness/max"]
    assert max(oldest, default=0) == whole.staleness


def test_the_engine_samples_what_was_exported_after_the_step_of_its_version(whole: Run) -> None:
    for step in (STEPS // 2, STEPS):
        check_sampled(whole.path, step, version=sampling_version(step, whole.staleness))


def check_sampled(run_dir: Path, step: int, *, version: int) -> None:
    """A step's tokens were drawn from that version of the policy, which the next one can be told from."""
    theirs, next_ones = (run_dir / f"weights/step-{done:06}" for done in (version, version + 1))
    assert furthest(logprobs_of(theirs, run_dir, step, "rollout_logprob")) < TOLERANCE
    assert furthest(logprobs_of(next_ones, run_dir, step, "rollout_logprob")) > 10 * TOLERANCE


def test_old_logprobs_are_the_samplers(whole: Run) -> None:
    tolerance = 0 if whole.staleness else TOLERANCE
    assert all(abs(row["old_logprob"] - row["rollout_logprob"]) <= tolerance for row in rows(whole.path, "tokens"))


def test_first_ratios_are_one_only_where_the_policy_that_samples_is_where_gradients_are_taken(whole: Run) -> None:
    ratios = [row["ratio"] for row in rows(whole.path, "tokens") if row["step"] == STEPS][:16]  # of one minibatch
    apart = np.abs(np.array(ratios) - 1).max()
    assert apart > 10 * TOLERANCE if whole.staleness or "free" in whole.case else apart < 1e-6


def test_a_run_that_is_killed_and_goes_on_is_the_uninterrupted_one_bit_for_bit(whole: Run, tmp_path: Path) -> None:
    run_dir = new_run(whole.inputs, tmp_path / "killed" / "run", whole.case)
    process = start([sys.executable, "-m", "rpg.train", str(run_dir)])
    wait_for_step(process, run_dir, KILLED_AFTER, saved=True)
    process.send_signal(signal.SIGKILL)
    finish(process, expect=-signal.SIGKILL)
    train(run_dir)
    first, second = (json.loads(path.read_text()) for path in sorted((run_dir / "attempts").glob("*.json")))
    assert (first["resumed_from_step"], second["resumed_from_step"] > 0) == (0, True)
    same_training(run_dir, whole.path)


def test_two_ranks_have_an_engine_each_that_samples_ahead(tmp_path: Path) -> None:
    make_inputs(tmp_path, head_dim=32)
    training, rollout = TRAINING | {"steps": 4, "ranks": 2}, ROLLOUT | {"max_staleness": 1}
    run_dir = make_run(tmp_path, tmp_path / "run", training=training, rollout=rollout)
    train(run_dir, ranks=2)
    versions = {(row["step"], row["policy_version"]) for row in rows(run_dir, "rollouts")}
    assert versions == {(step, sampling_version(step, 1)) for step in range(1, 5)}
    check_sampled(run_dir, 4, version=2)
