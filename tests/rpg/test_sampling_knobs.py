"""Which responses are trained on and with which weight: real trainings of a tiny model."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rpg.learner.deepspeed import Policy
from tests.rpg.tiny_run import make_run, rows, train

SHORT: dict[str, Any] = {"steps": 4, "schedule": {"type": "constant"}}


@pytest.fixture(scope="module")
def dynamic(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rollout = {"dynamic_sampling": {"max_batches": 4}}
    run_dir = make_run(inputs, tmp_path_factory.mktemp("runs") / "dynamic", rollout=rollout, training=SHORT)
    train(run_dir)
    return run_dir


def figures(run_dir: Path) -> dict[tuple[int, str], float]:
    return {(row["step"], row["name"]): row["value"] for row in rows(run_dir, "metrics")}


def sampled(run_dir: Path, first_step: int = 1) -> list[tuple[Any, ...]]:
    fields = ("step", "rollout_id", "group_id", "prompt_id", "response", "reward")
    found = [tuple(row[field] for field in fields) for row in rows(run_dir, "rollouts") if row["step"] >= first_step]
    return sorted(found)


@pytest.mark.more
def test_dynamic_sampling_trains_on_groups_that_vary_and_counts_the_others(dynamic: Path) -> None:
    metrics = figures(dynamic)
    for step in range(1, 5):
        mine = [row for row in rows(dynamic, "rollouts") if row["step"] == step]
        assert len(mine) == 32
        groups = [[row["reward"] for row in mine if row["group_id"] == group] for group in range(4)]
        equal = sum(len(set(rewards)) == 1 for rewards in groups)
        assert metrics[step, "dynamic_sampling/filled_groups"] == equal
        assert metrics[step, "zero_std_fraction"] == equal / 4
        assert equal == 0 or metrics[step, "dynamic_sampling/batches"] == 4
    assert any(metrics[step, "dynamic_sampling/dropped_groups"] > 0 for step in range(1, 5))


@pytest.mark.long
def test_two_ranks_choose_the_groups_that_one_chooses(inputs: Path, dynamic: Path, tmp_path: Path) -> None:
    rollout = {"dynamic_sampling": {"max_batches": 4}}
    run_dir = make_run(inputs, tmp_path / "two", rollout=rollout, training={**SHORT, "steps": 1, "ranks": 2})
    train(run_dir, ranks=2)
    assert sampled(run_dir) == [row for row in sampled(dynamic) if row[0] == 1]
    one, two = (
        {key: value for key, value in figures(run).items() if key[0] == 1 and key[1].startswith("dynamic_sampling/")}
        for run in (dynamic, run_dir)
    )
    assert one == two != {}


def test_a_resumed_run_takes_the_prompts_that_would_have_come_next(dynamic: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(dynamic.parent, runs)
    again = runs / dynamic.name
    for name, directory in json.loads((again / "inputs.json").read_text()).items():
        if name in ("data", "base"):
            (again / directory).parent.mkdir(parents=True, exist_ok=True)
            if not (again / directory).exists():
                shutil.copytree(dynamic / directory, again / directory)
    (again / "train.json").unlink()
    shutil.rmtree(again / "checkpoints" / "step-000004")
    train(again)
    assert sampled(again, first_step=3) == sampled(dynamic, first_step=3)
    one, two = figures(dynamic), figures(again)
    assert [one[step, "reward/mean"] for step in (3, 4)] == [two[step, "reward/mean"] for step in (3, 4)]
    assert one[4, "grad_norm"] == two[4, "grad_norm"]


@pytest.fixture(scope="module")
def filtered(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = make_run(
        inputs,
        tmp_path_factory.mktemp("runs") / "filtered",
        reward={"overlong": {"buffer": 4, "penalty": 0.5}},
        rollout={"correction": {"type": "truncate", "bound": 1.5}},
        training={**SHORT, "steps": 2, "mask_truncated": True, "entropy_coef": 0.01},
    )
    train(run_dir)
    return run_dir


def test_long_responses_lose_reward_as_the_equation_says(filtered: Path) -> None:
    for row in rows(filtered, "rollouts"):
        penalty = 0.5 * min(1.0, max(0.0, (row["num_tokens"] - (8 - 4)) / 4))
        assert row["reward"] == pytest.approx(float(row["correct"]) - penalty)
    assert any(row["reward"] == -0.5 for row in rows(filtered, "rollouts"))


def test_truncated_responses_are_in_no_loss(filtered: Path) -> None:
    for step in (1, 2):
        cut = {
            row["rollout_id"]
            for row in rows(filtered, "rollouts")
            if row["step"] == step and row["finish_reason"] == "length"
        }
        assert 0 < len(cut) < 32
        tokens = [row for row in rows(filtered, "tokens") if row["step"] == step]
        assert all((row["logprob"] is None) == (row["rollout_id"] in cut) for row in tokens)


def test_the_gap_between_engine_and_learner_is_a_metric(filtered: Path) -> None:
    metrics = figures(filtered)
    assert metrics[1, "rollout_ratio/max"] == pytest.approx(1, abs=1e-4)
    assert 0 <= metrics[1, "kl/rollout"] < 1e-6
    assert metrics[1, "clip_fraction/rollout"] == 0


def test_a_step_whose_responses_are_all_cut_changes_nothing(inputs: Path, tmp_path: Path) -> None:
    training = {**SHORT, "steps": 1, "mask_truncated": True, "checkpoint": {"every_steps": 1}}
    rollout = {"max_response_length": 1}
    run_dir = make_run(
        inputs, tmp_path / "cut", rollout=rollout, training=training, reference={"source": "behaviour", "update": None}
    )
    cut_only(inputs, run_dir)
    train(run_dir)
    metrics = figures(run_dir)
    assert metrics[1, "truncated_fraction"] == 1
    assert metrics[1, "grad_norm"] == 0
    before = AutoModelForCausalLM.from_pretrained(run_dir / json.loads((run_dir / "inputs.json").read_text())["base"])
    after = AutoModelForCausalLM.from_pretrained(run_dir / "weights" / "step-000001")
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def cut_only(inputs: Path, run_dir: Path) -> None:
    """Gives the run a base model that ends no response by itself within a token."""
    base = run_dir.parent / "base"
    shutil.copytree(inputs / "base", base)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings += 1.0
        embeddings[1] = -3.0
    model.save_pretrained(base)
    record = json.loads((run_dir / "inputs.json").read_text())
    (run_dir / "inputs.json").write_text(json.dumps({**record, "base": "../base"}))


def test_the_entropy_bonus_has_the_gradient_of_the_entropy(inputs: Path) -> None:
    ids = torch.tensor([[2, 3, 4, 2, 1], [3, 3, 4, 3, 1]])
    sources, targets = torch.tensor([2, 3, 7, 8]), torch.tensor([2, 1, 3, 1])
    model = AutoModelForCausalLM.from_pretrained(inputs / "base").double()
    policy = Policy(model, temperature=0.7, entropy_gradient=True)
    policy(ids, sources, targets)[1].mean().backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    logprobs = torch.log_softmax(model(ids).logits.flatten(0, 1)[sources] / 0.7, -1)
    (-(logprobs.exp() * logprobs).sum(-1)).mean().backward()
    for mine, parameter in zip(ours, model.parameters(), strict=True):
        np.testing.assert_allclose(mine, parameter.grad, atol=1e-10)
