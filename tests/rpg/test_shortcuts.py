"""Work that is left out, and the results that stay: responses without advantage, old logprobs that are known."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rpg.advantages import with_signal
from tests.rpg.tiny_run import make_run, rows, train

pytestmark = pytest.mark.more

NO_DIVERGENCE = {
    "objective": {"type": "rpg", "divergence": "none"},
    "reference": {"source": "behaviour", "update": None},
}


def new_run(inputs: Path, where: Path, training: dict[str, Any], rollout: dict[str, Any]) -> Path:
    short = {"steps": 2, "export_every_steps": 1, "minibatches": 4, **training}
    return make_run(inputs, where, training=short, rollout=rollout, **NO_DIVERGENCE)


@pytest.fixture(scope="module")
def trained(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain run, and one with each shortcut."""
    where = tmp_path_factory.mktemp("runs")
    changes: dict[str, Any] = {
        "plain": ({}, {}),
        "skipping": ({"skip_zero_advantage": True}, {}),
        "trusting": ({}, {"trust_logprobs": True}),
    }
    runs = {name: new_run(inputs, where / name, *change) for name, change in changes.items()}
    for run_dir in runs.values():
        train(run_dir)
    return runs


def test_a_step_that_skips_responses_without_advantage_updates_the_same(trained: dict[str, Path]) -> None:
    same_first_step(trained["plain"], trained["skipping"], "loss", "grad_norm", "reward/mean")


def same_first_step(one: Path, other: Path, *names: str) -> None:
    """Weights after the first step, and some of its figures, equal except for the order of sums."""
    mine, theirs = (load_file(run / "weights/step-000001/model.safetensors") for run in (one, other))
    for name, weights in mine.items():
        np.testing.assert_allclose(weights, theirs[name], rtol=1e-4, atol=1e-5, err_msg=name)
    for name in names:
        assert np.isclose(figures(one)[name], figures(other)[name], rtol=1e-4, atol=1e-9), name


def figures(run_dir: Path) -> dict[str, float]:
    """Figures of the first step."""
    return {row["name"]: row["value"] for row in rows(run_dir, "metrics") if row["step"] == 1}


def test_tokens_that_are_skipped_have_no_logprobs_and_their_share_is_told(trained: dict[str, Path]) -> None:
    tokens = [row for row in rows(trained["skipping"], "tokens") if row["step"] == 1]
    rollouts = {row["rollout_id"]: row for row in rows(trained["skipping"], "rollouts") if row["step"] == 1}
    computed = {row["rollout_id"] for row in tokens if row["logprob"] is not None}
    skipped = {row["rollout_id"] for row in tokens if row["logprob"] is None}
    assert not computed & skipped
    assert all(rollouts[index]["advantage"] == 0 for index in skipped)
    of_minibatches = [computed & set(range(first, first + 8)) for first in range(0, 32, 8)]
    signal = [any(rollouts[index]["advantage"] for index in part) for part in of_minibatches]
    assert True in signal
    assert False in signal
    assert [len(part) for part in of_minibatches] == [8 if has else 1 for has in signal]
    share = sum(rollouts[index]["num_tokens"] for index in computed) / len(tokens)
    assert np.isclose(figures(trained["skipping"])["trained_fraction"], share)
    assert "trained_fraction" not in figures(trained["plain"])
    assert all(row["old_logprob"] is None and row["ratio"] is None for row in tokens if row["rollout_id"] in skipped)


@pytest.mark.long
def test_two_ranks_skip_together(inputs: Path, tmp_path: Path, trained: dict[str, Path]) -> None:
    run_dir = new_run(inputs, tmp_path / "ranks", {"skip_zero_advantage": True, "ranks": 2}, {})
    train(run_dir, ranks=2)
    same_first_step(trained["plain"], run_dir, "loss", "grad_norm", "reward/mean")
    same_first_step(trained["skipping"], run_dir, "trained_fraction", "entropy", "ratio/mean")


def test_a_trusted_sampler_gives_the_old_logprobs_but_those_of_the_first_minibatch(trained: dict[str, Path]) -> None:
    tokens = rows(trained["trusting"], "tokens")
    first, others = ([row for row in tokens if (row["rollout_id"] < 8) is early] for early in (True, False))
    assert all(row["ratio"] == 1 for row in first)
    assert all(row["old_logprob"] == row["rollout_logprob"] for row in others)
    plain = [row for row in rows(trained["plain"], "tokens") if row["rollout_id"] >= 8]
    assert any(row["old_logprob"] != row["rollout_logprob"] for row in plain)
    same_first_step(trained["plain"], trained["trusting"], "loss", "grad_norm", "ratio/mean")


def test_a_single_token_with_an_advantage_is_a_signal() -> None:
    values = torch.tensor([0.0, 0.0, 0.0, 1e-30, 0.0, -0.0])
    assert with_signal(values, torch.tensor([2, 3, 1])).tolist() == [False, True, False]
