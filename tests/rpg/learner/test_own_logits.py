"""The policy that is trained is the model: what its logits go through is refused, and noise is off."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rpg.learner.own_logits import check_logits, prove_policy
from rpg.learner.policy import Policy, load_model
from specs.errors import SpecError
from specs.schema.training import Training
from tests.rpg.learner.every_architecture import TRAINS, VLLM, architectures, outcome_of, tiny_config

DOCS = Path(__file__).parents[3] / "docs" / "own-model.md"
CPU = torch.device("cpu")
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}


@pytest.mark.parametrize("name", ["gemma2", "cohere", "nanochat"])
def test_logits_that_are_scaled_or_capped_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"its logits go through .*(mul|tanh)"):
        check_logits(tiny_config(name))


@pytest.mark.more
@pytest.mark.parametrize("name", ["bert", "modernbert-decoder", "roberta"])
def test_a_layer_before_the_head_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"its logits go through .*gelu"):
        check_logits(tiny_config(name))


def test_a_cap_in_a_nested_config_is_refused() -> None:
    config = tiny_config("gemma4")
    check_logits(config)
    config.text_config.final_logit_softcapping = 30.0
    with pytest.raises(SpecError, match="tanh"):
        check_logits(config)


def test_a_model_that_cannot_be_built_here_is_refused() -> None:
    """Gemma 3n's images need timm. With it, the cap of its text config is seen."""
    with pytest.raises(SpecError, match=r"timm|tanh"):
        check_logits(AutoConfig.for_model("gemma3n"))


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "opt", "phi"])
def test_a_head_times_the_last_hidden_state_is_taken(name: str) -> None:
    """phi's head has a bias; OPT calls a part of what it names its base."""
    assert outcome_of(name) == TRAINS


def test_layers_with_windows_train_with_vllm() -> None:
    assert outcome_of("mistral") == VLLM


def test_a_policy_that_is_not_its_model_is_refused_when_it_is_opened() -> None:
    policy = Policy(AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32), temperature=1.0)
    prove_policy(policy, policy.model.config, CPU)
    policy.model.lm_head.register_forward_hook(lambda _module, _inputs, logits: 1.5 * logits)
    with pytest.raises(SpecError, match="from those of the model's own logits"):
        prove_policy(policy, policy.model.config, CPU)


def test_noise_that_nothing_switches_off_is_refused_when_the_policy_is_opened() -> None:
    policy = Policy(AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32), temperature=1.0)
    embedding = policy.model.get_input_embeddings()
    embedding.register_forward_hook(lambda _module, _inputs, states: states + torch.randn_like(states))
    with pytest.raises(SpecError, match="a second pass over the same tokens"):
        prove_policy(policy, policy.model.config, CPU)


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "noise"),
    [
        ("mixtral", {**MIXTURE, "router_jitter_noise": 0.1}),
        ("phimoe", {**MIXTURE, "router_jitter_noise": 0.1, "input_jitter_noise": 0.1}),
        ("minimax", {"router_jitter_noise": 0.1}),
        ("gpt2", {"attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3}),
        ("opt", {"dropout": 0.3, "layerdrop": 0.5}),
    ],
)
def test_noise_in_training_mode_is_switched_off(name: str, noise: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(name)
    for field, value in noise.items():
        setattr(config, field, value)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    settings = {"steps": 1, "prompts_per_step": 1, "group_size": 2, "optimizer": {"learning_rate": 1e-3}}
    training = Training.model_validate({**settings, "precision": "float32", "packing": False})
    model = load_model(tmp_path, training)
    assert model.training
    prove_policy(Policy(model, temperature=1.0), model.config, CPU)


@pytest.mark.long
def test_every_architecture_trains_or_is_refused_as_the_docs_say() -> None:
    outcomes = {name: outcome_of(name) for name in architectures()}
    assert table(outcomes) in DOCS.read_text()


def table(outcomes: dict[str, str]) -> str:
    """The table of docs/own-model.md."""
    others = sorted({outcome for outcome in outcomes.values() if outcome not in (TRAINS, VLLM)}, reverse=True)
    rows = [
        (outcome, [name for name, each in outcomes.items() if each == outcome]) for outcome in (TRAINS, VLLM, *others)
    ]
    lines = [f"| {outcome} | {len(names)} | {', '.join(names)} |" for outcome, names in rows]
    return "\n".join(["| | architectures | `model_type` |", "|---|---|---|", *lines])
