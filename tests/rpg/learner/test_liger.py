"""Liger's kernels compute what PyTorch's operations do. Triton's interpreter executes them here, on a CPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rpg.fused import MODEL_TYPES
from rpg.learner import kernels
from rpg.learner.kernels import are_right, kernels_for, use_liger
from specs.errors import SpecError
from specs.schema.training import Training
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
    assert found["trial"] < 1e-5


@pytest.mark.parametrize(
    ("model_type", "changes", "device", "message"),
    [
        ("qwen3", {}, "cpu", "Liger's kernels run on GPUs"),
        ("gpt2", {}, "cuda", "not been tested with this architecture"),
        ("llama", {"hidden_act": "gelu"}, "cuda", "has another activation than this model"),
    ],
)
def test_kernels_that_cannot_be_used_are_refused(
    model_type: str, changes: dict[str, Any], device: str, message: str
) -> None:
    config = AutoConfig.for_model(model_type, **changes)
    assert kernels_for(_training("liger"), AutoConfig.for_model("qwen3"), torch.device("cuda")) == "liger"
    with pytest.raises(SpecError, match=message):
        kernels_for(_training("liger"), config, torch.device(device))
    assert kernels_for(_training("auto"), config, torch.device(device)) == "torch"


def test_auto_takes_liger_where_it_gives_the_right_gradient_and_what_fails_there_is_pytorchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    qwen3, gpu = AutoConfig.for_model("qwen3"), torch.device("cuda")
    assert kernels_for(_training("torch"), qwen3, gpu) == "torch"
    are_right.cache_clear()
    assert kernels_for(_training("auto"), qwen3, gpu) == "torch", "there is no GPU to try them on"
    assert "Liger's kernels are not used: " in caplog.text
    are_right.cache_clear()
    for error, chosen in ((0.2, "torch"), (float("nan"), "torch"), (0.01, "liger")):
        monkeypatch.setattr(kernels, "_gradient_error", lambda *_, error=error: error)  # a GPU's part
        assert kernels_for(_training("auto"), qwen3, gpu) == chosen
        are_right.cache_clear()


def _training(chosen: str) -> Training:
    return Training.model_validate({"steps": 1, "prompts_per_step": 1, "group_size": 1, "kernels": chosen})


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
