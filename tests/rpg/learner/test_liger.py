"""Liger's kernels compute what PyTorch's operations do. Triton's interpreter executes them here, on a CPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rpg.learner.kernels import MODEL_TYPES, check_kernels, use_liger
from specs.errors import SpecError
from tests.rpg.liger_worker import SHAPE
from tests.rpg.tiny_run import finish, start


@pytest.mark.long
@pytest.mark.parametrize("recomputes", ["false", "true", '"selective"'])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logprobs_and_gradients_are_those_of_pytorch(model_type: str, recomputes: str, tmp_path: Path) -> None:
    """Packed and padded, of every parameter, in float32: numbers of type bfloat16 the interpreter does not have."""
    command = [sys.executable, "-m", "tests.rpg.liger_worker", model_type, recomputes, str(tmp_path)]
    output = finish(start(command, environment={"TRITON_INTERPRET": "1"}))
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert found["tensors"] > 40
    assert found["worst"] < 1e-5


@pytest.mark.parametrize(
    ("model_type", "changes", "device", "message"),
    [
        ("qwen3", {}, "cpu", "Liger's kernels run on GPUs"),
        ("gpt2", {}, "cuda", "not tried with this architecture"),
        ("llama", {"hidden_act": "gelu"}, "cuda", "has another activation than this model"),
    ],
)
def test_kernels_that_cannot_be_used_are_refused(
    model_type: str, changes: dict[str, Any], device: str, message: str
) -> None:
    check_kernels(AutoConfig.for_model("qwen3"), torch.device("cuda"))
    with pytest.raises(SpecError, match=message):
        check_kernels(AutoConfig.for_model(model_type, **changes), torch.device(device))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_other_models_stay_as_they_are(model_type: str) -> None:
    """A sampler's own model is made later, in the same process; another learner's was made before. Neither could
    compute on this CPU with Liger's kernels."""
    config = AutoConfig.for_model(model_type, **SHAPE, mlp_bias=True)
    model, other = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    ids = torch.arange(5)[None]
    before = other(ids).logits
    use_liger(model, keeps_products=False)
    later = AutoModelForCausalLM.from_config(config)
    assert torch.equal(other(ids).logits, before)
    later(ids)
    rotations = {layer.self_attn.forward.__globals__["apply_rotary_pos_emb"] for layer in model.model.layers}
    assert [rotation.__name__ for rotation in rotations] == ["liger_rotary_pos_emb"]
    assert "LigerRMSNorm" in str(model)
    assert "LigerSwiGLUMLP" in str(model)
    assert str(later) == str(other)
    assert later.state_dict().keys() == model.state_dict().keys()
