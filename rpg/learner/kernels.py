"""Fused kernels for a model's norms, rotations and gated MLPs: Liger-Kernel, Hsu 2024, arXiv:2410.10989.

Each kernel reads and writes its tensors once, while PyTorch's operations do so several times, and keeps less for the
backward pass.
"""

import logging
import sys
from copy import deepcopy
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Literal, assert_never

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rpg.fused import lacks_kernels
from specs.errors import Issue, SpecError
from specs.schema.training import Training

_TINY: dict[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"intermediate_size": 96, "vocab_size": 64, "head_dim": 32},
}
"""Settings of the model on which kernels are tested."""
_ROTATION = "apply_rotary_pos_emb"
"""Name, in these architectures' modules, of the function that rotates queries and keys."""
_LARGEST_ERROR = 0.05
"""Largest accepted relative difference, in norm, between gradients with these kernels and with PyTorch. Rounding to
bfloat16 gives 0.01."""


def kernels_for(training: Training, config: PretrainedConfig, device: torch.device) -> Literal["torch", "liger"]:
    """Returns which kernels compute norms, rotations and gates on the device.

    Raises:
        SpecError: the spec requires Liger's kernels, and they cannot be used.
    """
    issue = _issue(config, device)
    match training.kernels:
        case "torch":
            return "torch"
        case "liger":
            if issue:
                raise SpecError(issue)
            return "liger"
        case "auto":
            return "liger" if issue is None and are_right(config.model_type, device) else "torch"
        case never:
            assert_never(never)


def _issue(config: PretrainedConfig, device: torch.device) -> Issue | None:
    """Returns why Liger's kernels cannot be used."""
    if device.type != "cuda":
        path, given = ("training", "kernels"), f"liger on a {device.type}"
        return Issue("Liger's kernels run on GPUs", path, given=given, hint="leave kernels out")
    return lacks_kernels(config.model_type, getattr(config, "hidden_act", ""))


@cache
def are_right(model_type: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Returns whether the gradient of a tiny model of the type agrees with that of PyTorch's operations.

    It fails for example if the machine lacks a part that Triton's compiler needs."""
    try:
        error = _gradient_error(model_type, device, dtype)
    except Exception as failure:  # whatever it lacks
        logging.getLogger(__name__).warning("Liger's kernels are not used: %s", failure)
        return False
    if not error < _LARGEST_ERROR:
        logging.getLogger(__name__).warning("Liger's kernels are not used: a gradient is off by %.2g", error)
        return False
    return True


def _gradient_error(model_type: str, device: torch.device, dtype: torch.dtype) -> float:
    """Returns the norm of the gradients' difference over the gradients' norm."""
    config = AutoConfig.for_model(model_type, **_TINY)
    gradients = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(config).to(device, dtype)  # type: ignore[no-untyped-call]
    fused = deepcopy(plain)
    use_liger(fused, keeps_products=False)
    ids = torch.arange(64, device=device).view(2, 32)
    for model in (plain, fused):
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
        (states * torch.linspace(-1, 1, states.shape[-1], device=device)).square().mean().backward()
        found = [weight.grad.float().flatten() for weight in model.base_model.parameters() if weight.grad is not None]
        gradients.append(torch.cat(found))
    return float((gradients[1] - gradients[0]).norm() / gradients[0].norm())


def use_liger(model: PreTrainedModel, *, keeps_products: bool) -> None:
    """Makes the model compute norms, rotations and gated MLPs with Liger's kernels. Other models stay unchanged.

    Args:
        keeps_products: whether recomputation keeps the results of products, see `rpg.learner.recomputation`. Liger's
            rotation overwrites its input queries and keys. Without a norm before it, these are such results and would
            be rotated twice, so the rotation stays PyTorch's.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    modeling = sys.modules[type(model).__module__]
    classes = {name: value for name, value in vars(modeling).items() if isinstance(value, type)}
    MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type](
        model=model,
        rope=False,  # it would replace that of all models of the architecture in this process
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,  # rpg.learner.logprobs computes the output head
    )
    # Liger substitutes its own classes for models built later. Its MLP has no biases, which a llama's may have.
    for name, value in classes.items():
        setattr(modeling, name, value)
    if not keeps_products or model.config.model_type == "qwen3":
        _use_rotation(model)


def _use_rotation(model: PreTrainedModel) -> None:
    """Makes the model's attention rotate queries and keys with Liger's kernel.

    A forward method of transformers looks the function up by name in its module. So each attention gets a copy of its
    class's forward, in which the name refers to Liger's function.
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
