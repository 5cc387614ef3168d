"""A layer that recomputes some of its activations gives the gradients of one that keeps them all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rpg.learner.packing import Packing
from rpg.learner.policy import Policy, load_model
from specs.schema.training import Training
from tests.memory import PeakMemory

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {**SHAPE, "head_dim": 16, "num_hidden_layers": 6},
    "qwen2": {**SHAPE, "num_hidden_layers": 6},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 6, "bos_token_id": 0, "eos_token_id": 0},
}
PACKED = Packing(((20, 40, 33, 61), (47, 55)), torch.device("cpu"))
TOKENS = PACKED.places.numel()
SOURCES = torch.arange(0, TOKENS - 1, 2)


def made(directory: Path, model_type: str, recomputes: bool | str, **changes: Any) -> Policy:
    """A policy of random weights, the same at every call, with gradients of zero."""
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **SHAPES[model_type], vocab_size=40)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    settings = {"steps": 1, "prompts_per_step": 1, "group_size": 1, "gradient_checkpointing": recomputes, **changes}
    torch.manual_seed(0)
    policy = Policy(load_model(directory, Training.model_validate(settings)), temperature=1.0)
    for weight in policy.parameters():
        weight.grad = torch.zeros_like(weight)
    return policy


def add_gradients(policy: Policy, packing: Packing | None = PACKED) -> Tensor:
    """Adds the gradients of a row of several sequences, or of four rows; returns the logprobs."""
    ids = (torch.arange(TOKENS) * 7 % 40).view(1 if packing else 4, -1)
    logprobs, _ = policy(ids, SOURCES, ids.flatten()[SOURCES + 1], packing=packing)
    (logprobs * torch.linspace(-1, 1, len(SOURCES))).sum().backward()
    return logprobs.detach()


@pytest.mark.more
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {}),
        pytest.param("qwen3", {"precision": "bfloat16"}, marks=pytest.mark.long),
        ("qwen3", {"lora": {"rank": 2}}),
        pytest.param("qwen2", {}, marks=pytest.mark.long),
        ("gpt2", {}),
    ],
)
def test_what_is_kept_changes_memory_and_arithmetic_and_no_bit_of_the_gradient(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    results, peaks, operations = [], [], []
    for recomputes in (False, "selective", True):
        policy = made(tmp_path, model_type, recomputes, **changes)
        weights = list(policy.parameters())
        with PeakMemory([held for weight in weights for held in (weight, weight.grad) if held is not None]) as memory:
            packed = add_gradients(policy)
        with FlopCounterMode(display=False) as arithmetic:
            padded = add_gradients(policy, packing=None)
        results.append([packed, padded, *(weight.grad for weight in weights if weight.grad is not None)])
        peaks.append(memory.peak)
        operations.append(arithmetic.get_total_flops())
    print(f"memory {peaks[1] / peaks[0]:.2f} {peaks[2] / peaks[0]:.2f}, operations {operations}")
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
    assert peaks[2] < 0.7 * peaks[1] < 0.7**2 * peaks[0]
    assert operations[1] < 1.03 * operations[0] < 1.2 * operations[0] < operations[2]


@torch.no_grad()
def test_a_pass_without_gradient_keeps_nothing(tmp_path: Path) -> None:
    """Old and reference logprobs are computed so."""
    peaks = []
    for recomputes in (False, "selective"):
        policy = made(tmp_path, "qwen3", recomputes)
        with PeakMemory(list(policy.parameters())) as memory:
            policy(torch.arange(TOKENS)[None] % 40, SOURCES, SOURCES % 40, packing=PACKED)
        peaks.append(memory.peak)
    assert peaks[0] == peaks[1]
