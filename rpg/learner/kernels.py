"""Fused kernels in place of a model's norms, rotations and gated MLPs: Liger-Kernel, Hsu 2024, arXiv:2410.10989.

Each reads and writes its tensors once, where PyTorch's own operations do so several times, and keeps less of them for
the backward pass.
"""

import sys
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from specs.errors import Issue, SpecError

MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Architectures whose logprobs and gradients with these kernels are held against PyTorch's by the tests."""
_ACTIVATIONS = ("silu", "swish")
"""Two names of the one activation that Liger's gated MLP has. It takes the place of any other without a word."""
_PATH = ("training", "kernels")
_ROTATION = "apply_rotary_pos_emb"
"""What the modules of these architectures call the function that rotates queries and keys."""


def check_kernels(config: PretrainedConfig, device: torch.device) -> None:
    """Raises SpecError where Liger's kernels cannot be used: on a CPU, for another architecture or
    activation, or not installed."""
    if device.type != "cuda":
        raise SpecError(
            Issue("Liger's kernels run on GPUs", _PATH, given=f"liger on a {device.type}", hint="leave kernels out")
        )
    if config.model_type not in MODEL_TYPES:
        raise SpecError(
            Issue(
                "Liger's kernels are not tried with this architecture",
                _PATH,
                given=f"liger for {config.model_type}",
                allowed=f"liger for {', '.join(MODEL_TYPES)}",
                hint="leave kernels out",
            )
        )
    if config.hidden_act not in _ACTIVATIONS:
        raise SpecError(
            Issue(
                "Liger's gated MLP has another activation than this model",
                _PATH,
                given=f"liger for hidden_act {config.hidden_act}",
                allowed=f"liger for hidden_act {' or '.join(_ACTIVATIONS)}",
                hint="leave kernels out",
            )
        )
    if find_spec("liger_kernel") is None:
        hint = "pip install 'rpg-experiments[liger]'"
        raise SpecError(Issue("Liger-Kernel is not installed", _PATH, given="liger", hint=hint))


def use_liger(model: PreTrainedModel, *, keeps_products: bool) -> None:
    """Has the model compute norms, rotations and gated MLPs by Liger's kernels. Other models stay as they are.

    Args:
        keeps_products: whether recomputation keeps the results of products, see `rpg.learner.recomputation`. Liger's
            rotation overwrites the queries and keys that it is given. Where no norm stands before it, these are such
            results, and would be rotated twice, so the rotation stays PyTorch's.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    modeling = sys.modules[type(model).__module__]
    classes = {name: value for name, value in vars(modeling).items() if isinstance(value, type)}
    MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type](
        model=model,
        rope=False,  # it would be that of all models of the architecture in this process
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,  # rpg.learner.logprobs has the output head
    )
    # Liger puts its own classes in for models that are made later. Its MLP has no biases, which a llama's may have.
    for name, value in classes.items():
        setattr(modeling, name, value)
    if not keeps_products or model.config.model_type == "qwen3":
        _use_rotation(model)


def _use_rotation(model: PreTrainedModel) -> None:
    """Has the model's attention rotate queries and keys by Liger's kernel.

    A forward of transformers calls the function that its module has under a name. So each attention gets a copy of its
    class's forward, for which that name stands for Liger's function.
    """
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    attentions = [module for module in model.modules() if _ROTATION in type(module).forward.__code__.co_names]
    assert attentions, f"no forward of {type(model).__name__} calls {_ROTATION}"
    for attention in attentions:
        plain: Any = type(attention).forward
        names = {**plain.__globals__, _ROTATION: liger_rotary_pos_emb}
        forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
        forward.__kwdefaults__ = plain.__kwdefaults__
        attention.forward = MethodType(forward, attention)
