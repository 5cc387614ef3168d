"""The trainer follows the spec on divergences in the reward, whitening and averaged references."""

from pathlib import Path

import numpy as np
import pytest

from tests.rpg.tiny_run import make_run, rows, train


def test_rloo_trains_on_rewards_less_the_recorded_divergence_from_the_initial_policy(
    inputs: Path, tmp_path: Path
) -> None:
    run_dir = make_run(
        inputs,
        tmp_path / "rloo",
        objective={"type": "rloo", "kl_coef": 0.5},
        advantage={"baseline": "leave_one_out"},
        reference={"source": "initial", "update": None},
        training={"steps": 2},
    )
    train(run_dir)
    rollouts = [row for row in rows(run_dir, "rollouts") if row["step"] == 2]
    tokens = [row for row in rows(run_dir, "tokens") if row["step"] == 2]
    divergence = np.zeros(len(rollouts))
    for row in tokens:
        divergence[row["rollout_id"]] += row["old_logprob"] - row["ref_logprob"]
    assert np.abs(divergence).max() > 0.05, "the policy has moved away from its start"
    rewards = np.array([row["reward"] for row in rollouts]) - 0.5 * divergence
    groups = rewards.reshape(-1, 8)
    expected = (groups - (groups.sum(-1, keepdims=True) - groups) / 7).ravel()
    assert np.allclose([row["advantage"] for row in rollouts], expected, atol=1e-5)


@pytest.mark.long
def test_reinforce_plus_plus_whitens_over_all_tokens_of_all_ranks_and_the_reference_follows_slowly(
    inputs: Path, tmp_path: Path
) -> None:
    run_dir = make_run(
        inputs,
        tmp_path / "whitened",
        objective={"type": "reinforce_plus_plus", "kl_coef": 0.1},
        advantage={"baseline": "none", "whiten": "tokens"},
        reference={"source": "snapshot", "update": {"ema_decay": 0.5}},
        training={"steps": 2, "ranks": 2},
    )
    train(run_dir, ranks=2)
    rollouts = [row for row in rows(run_dir, "rollouts") if row["step"] == 2]
    total = sum(row["advantage"] * row["num_tokens"] for row in rollouts)
    assert abs(total) < 1e-3
    metrics = {(row["step"], row["name"]): row["value"] for row in rows(run_dir, "metrics")}
    assert metrics[2, "reference/version"] == 1
    tokens = [row for row in rows(run_dir, "tokens") if row["step"] == 2 and row["rollout_id"] < 16]
    apart = np.array([row["old_logprob"] - row["ref_logprob"] for row in tokens])
    assert np.abs(apart).max() > 1e-4, "half-way between the initial policy and the present one"
