"""Which weights sample, serve as reference, are saved and exported, with adapters and with Schedule-Free AdamW."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rpg.checkpoints.pieces import PieceFiles
from tests.rpg.tiny_engine import fresh_logprobs, sampling
from tests.rpg.tiny_run import TOKENS, assert_trained, finish, make_inputs, make_run, rows, start

pytestmark = pytest.mark.more

LORA = {"rank": 4, "alpha": 8.0}
FREE = {"type": "schedule_free_adamw", "learning_rate": 0.03}
SNAPSHOT = {"source": "snapshot", "update": {"every_steps": 3}}
INITIAL = {"source": "initial", "update": None}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({"lora": LORA}, SNAPSHOT),
    "free": ({"optimizer": FREE, "zero_stage": 2, "precision": "bfloat16"}, SNAPSHOT),
    "free-lora-3": (
        {"optimizer": FREE, "lora": {**LORA, "target_modules": ["q_proj", "o_proj"]}, "zero_stage": 3},
        INITIAL,
    ),
}
"""What differs in the training section, and the reference."""
STEPS = 4
TRAINING = {
    **{"steps": STEPS, "export_every_steps": 2, "checkpoint": {"every_steps": 2}},
    **{"schedule": {"type": "constant", "warmup_updates": 2}, "optimizer": {"learning_rate": 0.03}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with each run, and with what became of it when it went on from step 2, called `<run>-again`."""
    inputs, place = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("runs")
    make_inputs(inputs)
    arguments = []
    for name, (changes, reference) in RUNS.items():
        run = make_run(inputs, place / name, training=TRAINING | changes, reference=reference)
        arguments += [str(run), f"{run}:{place / name}-again"]
    finish(start([sys.executable, "-m", "tests.rpg.train_worker", *arguments]), seconds=500)
    (place / "base").symlink_to(inputs / "base")
    return place


def logprobs_of(model_dir: Path, run: Path, step: int, column: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logprobs of each response of a step: those that the run recorded, and those of a model on disk."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokens = [row for row in rows(run, "tokens") if row["step"] == step]
    pairs = []
    for rollout in (row for row in rows(run, "rollouts") if row["step"] == step):
        prompt = tuple(TOKENS.index(character) for character in rollout["prompt"])
        response = sorted((t for t in tokens if t["rollout_id"] == rollout["rollout_id"]), key=lambda t: t["position"])
        fresh = fresh_logprobs(model, prompt, tuple(t["token_id"] for t in response), sampling())
        pairs.append((torch.tensor([t[column] for t in response]), fresh.float()))
    return pairs


def furthest(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return max(float((one - two).abs().max()) for one, two in pairs)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("column", ["rollout_logprob", "old_logprob"])
def test_what_is_exported_samples_the_next_step_and_gives_its_old_logprobs(runs: Path, name: str, column: str) -> None:
    tolerance = 0.05 if name == "free" else 1e-4  # bfloat16 or float32
    assert furthest(logprobs_of(runs / name / "weights/step-000002", runs / name, 3, column)) < tolerance
    assert furthest(logprobs_of(runs / "base", runs / name, 3, column)) > 4 * tolerance


def test_the_initial_reference_is_the_base_model(runs: Path) -> None:
    assert furthest(logprobs_of(runs / "base", runs / "free-lora-3", STEPS, "ref_logprob")) < 1e-4


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_goes_on_is_the_run_that_did_not_stop(runs: Path, name: str) -> None:
    last = f"weights/step-{STEPS:06}/model.safetensors"
    one, two = load_file(runs / name / last), load_file(runs / f"{name}-again" / last)
    assert_trained(runs / name)
    assert all(torch.equal(one[key], two[key]) for key in one | two)
    one, other = (
        {(row["step"], row["rollout_id"], row["position"]): row["logprob"] for row in rows(runs / run, "tokens")}
        for run in (name, f"{name}-again")
    )
    assert one == other


def test_first_ratios_are_one_only_where_gradients_are_taken_at_the_policy(runs: Path) -> None:
    # With one epoch, tokens of the first minibatch are trained on once, before any update of their step.
    for name, on_policy in (("lora", True), ("free-lora-3", False)):
        tokens = [row for row in rows(runs / name, "tokens") if row["step"] == 3]
        ratios = np.array([row["ratio"] for row in tokens[: len(tokens) // 4]])
        assert (np.abs(ratios - 1).max() < 1e-6) == on_policy, name


def test_frozen_weights_have_no_gradient_no_optimizer_state_and_no_place_in_a_checkpoint(runs: Path) -> None:
    checkpoint = runs / f"lora/checkpoints/step-{STEPS:06}"
    saved = PieceFiles(checkpoint, "learner").names()
    trained = {name.partition("|")[0] for name in saved}
    assert trained
    assert all("lora_" in name for name in trained)
    assert set(saved) == {f"{name}|{kind}" for name in trained for kind in ("weight", "exp_avg", "exp_avg_sq")}
    assert set(PieceFiles(checkpoint, "reference").names()) == trained


def test_the_exported_adapter_on_the_base_is_the_exported_model(runs: Path) -> None:
    from peft import PeftModel

    weights = runs / f"lora/weights/step-{STEPS:06}"
    ids = torch.tensor([[2, 3, 4, 2, 3]])
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(runs / "base"), str(weights / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(weights)
    assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-5)
    assert load_file(weights / "model.safetensors").keys() == load_file(runs / "base/model.safetensors").keys()
