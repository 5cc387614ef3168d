"""Training with a vLLM engine as the sampler."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from specs.metrics import METRICS
from tests.rpg.tiny_run import make_inputs, make_run, rows, train


@pytest.mark.more
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("experts", [None, pytest.param({}, marks=pytest.mark.long)], ids=["dense", "experts"])
def test_each_step_is_sampled_with_the_weights_of_the_step_before(
    experts: dict[str, Any] | None, tmp_path: Path
) -> None:
    make_inputs(tmp_path, head_dim=32, experts=experts)
    changes = {"steps": 3, "optimizer": {"learning_rate": 0.01}, "schedule": {"type": "constant"}}
    run_dir = make_run(tmp_path, tmp_path / "run", training=changes, rollout={"engine": "vllm"})
    train(run_dir)
    assert {(row["step"], row["policy_version"]) for row in rows(run_dir, "rollouts")} == {(1, 0), (2, 1), (3, 2)}
    for row in rows(run_dir, "tokens"):
        assert abs(row["rollout_logprob"] - row["old_logprob"]) < 1e-3
    apart = {row["step"]: row["value"] for row in rows(run_dir, "metrics") if row["name"] == "sentinel/difference"}
    assert apart.keys() == {1, 2, 3}
    optional = {metric.name: metric.recorded_with for metric in METRICS if metric.recorded_with}
    parts = ["a vllm engine", *(["a mixture of experts"] if experts is not None else [])]
    recorded = {row["name"] for row in rows(run_dir, "metrics")}
    assert recorded & optional.keys() == {name for name, part in optional.items() if part in parts}
    assert all(0 <= difference < 1e-3 for difference in apart.values())
    moved = {row["step"]: row["value"] for row in rows(run_dir, "metrics") if row["name"] == "kl/reverse"}
    assert moved[3] > 1e-3, "the policy has moved away from the reference, so stale weights would show"
