"""Liger's kernels against PyTorch's operations: `liger_worker MODEL_TYPE RECOMPUTES DIRECTORY` prints JSON.

Triton's interpreter (TRITON_INTERPRET=1) executes the kernels on a CPU, program by program.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rpg.learner import kernels
from rpg.learner.packing import Packing
from rpg.learner.policy import Policy, load_model
from specs.schema.training import Training

FAMILIES = ((3, 4, 2), (5,))
TOKENS = sum(map(sum, FAMILIES))
SHAPE: dict[str, Any] = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 40, "vocab_size": 20, "head_dim": 8},
}


def passed(directory: Path, packed: bool, **settings: Any) -> list[torch.Tensor]:
    """Logprobs and gradients."""
    training = Training.model_validate({"steps": 1, "prompts_per_step": 1, "group_size": 1, **settings})
    policy = Policy(load_model(directory, training), temperature=1.0)
    ids = torch.arange(TOKENS) * 7 % 20
    packing = Packing(FAMILIES, ids.device) if packed else None
    sources = torch.arange(TOKENS - 1)
    logprobs, _ = policy(ids.view(1 if packed else 2, -1), sources, ids[1:], packing=packing)
    (logprobs * torch.linspace(-1, 1, len(sources))).sum().backward()
    gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    return [logprobs.detach(), *gradients]


def complete_interpreter() -> None:
    """Gives Triton's interpreter what its compiler has: numbers as values of type float32, and a device's rsqrt."""
    from liger_kernel.ops import rms_norm
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_numbers(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), language.float32)
        return language.tensor(handle, language.float32)

    interpreter._implicit_cvt = with_numbers
    rms_norm.rsqrt = lambda value: language.math.rsqrt(value)


def main(model_type: str, recomputes: str, directory: Path) -> None:
    complete_interpreter()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE))
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(directory)
    plain = [passed(directory, packed) for packed in (True, False)]
    settings = {"kernels": "liger", "gradient_checkpointing": json.loads(recomputes)}
    fused = [passed(directory, packed, **settings) for packed in (True, False)]
    errors = [
        float((one - two).norm() / two.norm())
        for ones, twos in zip(fused, plain, strict=True)
        for one, two in zip(ones, twos, strict=True)
    ]
    trial = kernels._gradient_error(model_type, torch.device("cpu"), torch.float32)
    print(json.dumps({"tensors": len(errors), "worst": max(errors), "trial": trial}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
