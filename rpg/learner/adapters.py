"""Low-rank adapters on a transformers model: trained in place of its weights, and merged into them for sampling.

PEFT's modules are inserted into the model itself, so that it stays a transformers model and its weights keep readable
names: an adapted `q_proj.weight` is called `q_proj.base_layer.weight` inside and `q_proj.weight` outside.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rpg.pretrained import linear_modules
from specs.errors import Issue, SpecError
from specs.schema.training import Lora

if TYPE_CHECKING:  # importing PEFT takes a second, which a run without adapters should not wait for
    from peft import LoraConfig

_NAME = "default"
"""PEFT's default name of an adapter."""
_INSIDE = ".base_layer."


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Inserts adapters into the model and freezes the rest. torch's generator draws A. B is 0, so that outputs do not
    change.

    Raises:
        SpecError: the model has no such target module, or it is no linear layer between the embeddings.
    """
    from peft import inject_adapter_in_model

    check_targets(model, lora)
    inject_adapter_in_model(_config(lora), model)


def _config(lora: Lora) -> "LoraConfig":
    from peft import LoraConfig

    targets = list(lora.target_modules) or "all-linear"
    alpha = lora.alpha  # annotated as an integer, used as a factor
    return LoraConfig(r=lora.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")  # type: ignore[arg-type]


def check_targets(model: PreTrainedModel, lora: Lora) -> None:
    """Raises SpecError if a target module is missing or is not a linear layer between the embeddings."""
    linear = {name for name, _ in linear_modules(model)}
    issues = [
        Issue(
            "the model has no such linear module",
            path=("training", "lora", "target_modules", index),
            given=name,
            allowed=", ".join(sorted(linear)),
        )
        for index, name in enumerate(lora.target_modules)
        if name not in linear
    ]
    if issues:
        raise SpecError(*issues)


def _adapted(module: nn.Module | None) -> bool:
    return hasattr(module, "lora_A")


def has_adapters(model: nn.Module) -> bool:
    """Returns whether `add_adapters` has inserted adapters into the model."""
    return any(map(_adapted, model.modules()))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disables the model's adapters within the block."""
    layers: list[Any] = [module for module in model.modules() if _adapted(module)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of a model, under its name in the model without adapters."""

    name: str
    parts: list[nn.Parameter]
    """Parameters that the weight is computed from: its own and, if it is adapted, the adapter's two."""
    layer: Any = None
    """PEFT's layer; None if the weight is not adapted."""

    @torch.no_grad()
    def whole(self) -> Tensor:
        """Returns the parameter W or, with an adapter, a new tensor W + (alpha / rank) B A, which is added in float32
        and rounded once.

        In bfloat16 the rounding drops the part of the product below 2^-9 of the weight; the trained model keeps it. The
        policy has then moved so little that merged and trained model differ by less than any two computations in
        bfloat16 arithmetic (decision 31). Stochastic rounding would drop nothing, but increase the difference.
        """
        parameter = self.parts[0].detach()
        if self.layer is None:
            return parameter
        product: Tensor = self.layer.get_delta_weight(_NAME)
        return (parameter.float() + product.float()).to(parameter.dtype)


def whole_weights(model: PreTrainedModel) -> Iterator[Weight]:
    """Yields the model's weights with adapters merged, under their names in the model without adapters."""
    modules: dict[str, Any] = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(_INSIDE)
        layer = modules.get(owner) if kind == "weight" else None
        if layer is not None and _adapted(layer):
            adapter = [layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight]
            yield Weight(f"{owner}.weight", [parameter, *adapter], layer)
        elif ".lora_" not in name:
            yield Weight(name.replace(_INSIDE, "."), [parameter])


def save_adapter(model: PreTrainedModel, lora: Lora, directory: Path) -> None:
    """Writes the adapter alone, in PEFT's format. Its weights must be whole."""
    from peft import get_peft_model_state_dict

    directory.mkdir(exist_ok=True)
    state = get_peft_model_state_dict(model)
    save_file(
        {f"base_model.model.{name}": weight.detach().cpu().contiguous() for name, weight in state.items()},
        directory / "adapter_model.safetensors",
    )
    _config(lora).save_pretrained(str(directory))
