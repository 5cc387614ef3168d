"""Liger's kernels compute what PyTorch's operations do. Triton's interpreter executes them here, on a CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from rpg.learner.kernels import MODEL_TYPES, check_kernels
from specs.errors import SpecError
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
    ("model_type", "device", "message"),
    [
        ("qwen3", "cpu", "Liger's kernels run on GPUs"),
        ("gpt2", "cuda", "not tried with this architecture"),
    ],
)
def test_kernels_that_cannot_be_used_are_refused(model_type: str, device: str, message: str) -> None:
    check_kernels(AutoConfig.for_model("qwen3"), torch.device("cuda"))
    with pytest.raises(SpecError, match=message):
        check_kernels(AutoConfig.for_model(model_type), torch.device(device))
