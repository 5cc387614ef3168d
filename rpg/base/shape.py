"""Computes the figures of a decoder that determine memory and time. The model is built without values for this.

`python -m rpg.base.shape SETTINGS.json FIGURES.json` reads the settings of a config.json and writes the figures, so
that the planner needs no torch.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpg.base.traffic import Traffic, traffic_of
from rpg.pretrained import context_of, experts_per_token, first_size, linear_modules
from specs.machine.files import write_json
from specs.machine.parent import die_with_parent

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The figures of a decoder that determine memory and time."""

    parameters: int
    active_parameters: int
    """Parameters that one token uses: all except those of experts that it is not routed to."""
    matrix_parameters: int
    """Parameters that multiply every token: the active ones without embeddings, except an embedding that is also the
    output head."""
    expert_parameters: int
    """Parameters of all experts that tokens are routed to."""
    router_parameters: int
    """Parameters of the routers, which choose the experts."""
    largest_weight: int
    """Elements of the largest parameter."""
    linear_widths: dict[str, int]
    """Name of linear modules -> sum of their inputs and outputs. The output head is left out."""
    hidden_size: int
    layers: int
    key_value_size: int
    """Size of a token's key in one layer, over all heads."""
    attention_size: int
    """Size of a token's query in one layer, over all heads."""
    intermediate_size: int
    """Width of the MLP. With experts, the summed width of one token's experts."""
    experts_per_token: int
    """Number of a layer's experts that a token is routed to; 0 if the model has no experts."""
    vocab_size: int
    context: int
    is_gated: bool
    """Whether the MLP has a gate, as in Llama and its descendants but not in GPT-2."""
    norms_queries: bool
    """Whether queries and keys are normalised, as in Qwen3."""
    traffic: Traffic | None = None
    """Work of a pass; None if it was not counted or the model does not run on meta tensors."""

    @classmethod
    def of_figures(cls, figures: Mapping[str, Any]) -> "ModelShape":
        """Builds the shape from the result of `asdict`."""
        traffic = figures["traffic"]
        return cls(**{**figures, "traffic": Traffic.of_figures(traffic) if traffic else None})

    @property
    def read_parameters(self) -> int:
        """Returns the number of parameters that a large batch of tokens is multiplied by, including those of all
        experts."""
        return self.matrix_parameters + self.parameters - self.active_parameters

    def training_flops(self, tokens: int, responses: int, *, pairs: float, frozen: bool = False) -> float:
        """Returns the number of operations of a forward and a backward pass, without recomputation.

        Args:
            tokens: number of tokens that go through the layers.
            responses: number of those tokens that also go through the output head: the response tokens.
            pairs: number of pairs of tokens that see each other in attention.
            frozen: whether the weights have no gradient, as when adapters are trained.
        """
        head = self.vocab_size * self.hidden_size
        each = 4.0 if frozen else 6.0
        products = tokens * (self.matrix_parameters - head) + responses * head
        return each * products + 12.0 * self.layers * self.attention_size * pairs


def shape_of_config(settings: Mapping[str, Any]) -> ModelShape:
    """Returns the figures of the model that transformers builds from a config.json's settings. Raises transformers'
    exceptions."""
    from rpg.pretrained import config_of_settings, model_without_weights

    return shape_of(model_without_weights(config_of_settings(settings)))


def counted(settings: Mapping[str, Any]) -> ModelShape:
    """Returns the figures, with the work of a pass if the model runs on meta tensors. Raises as `shape_of_config`
    does."""
    shape = shape_of_config(settings)
    try:
        return replace(shape, traffic=traffic_of(settings))
    except Exception:  # architectures that read values, each with its own exception
        return shape


def shape_of(model: "PreTrainedModel") -> ModelShape:
    """Returns the figures of a model."""
    text = model.config.get_text_config()
    parameters = sum(weight.numel() for weight in model.parameters())
    experts = {name: module for name, module in model.named_modules() if _holds_experts(name, module)}
    of_experts = sum(_size(module) for module in experts.values())
    chosen = min(experts_per_token(text), *map(_number_of_experts, experts.values()), 10**9) if experts else 0
    active: float = parameters
    if chosen:
        active -= sum(_size(module) * (1 - chosen / _number_of_experts(module)) for module in experts.values())
    widths = Counter[str]()
    for name, module in linear_modules(model):
        widths[name] += sum(module.weight.shape)
    hidden, heads = first_size(text, "hidden_size"), first_size(text, "num_attention_heads")
    # If keys consist of a compressed and a rotated part, each head has its own key.
    compressed = first_size(text, "qk_nope_head_dim") + first_size(text, "qk_rope_head_dim")
    head_size = compressed or first_size(text, "head_dim") or (hidden // heads if heads else 0)
    key_heads = heads if compressed else (first_size(text, "num_key_value_heads") or heads)
    names = {part for name, _ in model.named_parameters() for part in name.split(".")}
    gated = not names.isdisjoint(_GATES)
    inner = first_size(text, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
    return ModelShape(
        parameters=parameters,
        active_parameters=round(active),
        matrix_parameters=round(active) - _looked_up(model),
        expert_parameters=of_experts,
        router_parameters=sum(_size(module) for module in _routers(model, experts)),
        largest_weight=max(weight.numel() for weight in model.parameters()),
        linear_widths=dict(widths),
        hidden_size=hidden,
        layers=first_size(text, "num_hidden_layers"),
        key_value_size=head_size * key_heads,
        attention_size=head_size * heads,
        intermediate_size=max(inner, _experts_width(model, experts, chosen, hidden, gated=gated)),
        experts_per_token=chosen,
        vocab_size=first_size(text, "vocab_size"),
        context=context_of(model.config) or 0,
        is_gated=gated,
        norms_queries=not names.isdisjoint(_QUERY_NORMS),
    )


_GATES = ("gate_proj", "gate_up_proj", "up_gate_proj", "w3", "v1", "input_linear")
"""Parts of matrix names that identify a gated MLP."""
_QUERY_NORMS = ("q_norm", "query_layernorm", "q_layernorm")
"""Names of the modules that normalise queries."""


def _size(module: "nn.Module") -> int:
    return sum(weight.numel() for weight in module.parameters())


def _holds_experts(name: str, module: "nn.Module") -> bool:
    """Returns whether a module holds all experts of a layer: as a list, or as a class with all of them in one
    tensor."""
    is_stack = type(module).__name__.endswith("Experts") and "shared" not in name
    is_list = name.rpartition(".")[2] == "experts"
    return (is_stack or is_list) and _size(module) > 0 and not _holds_experts_within(module)


def _holds_experts_within(module: "nn.Module") -> bool:
    return any(_holds_experts(name, inside) for name, inside in module.named_modules() if name)


def _number_of_experts(experts: "nn.Module") -> int:
    """Returns the number of experts of a layer: a list's length, or the first dimension of the tensor with all of
    them."""
    stacked = [weight.shape[0] for weight in experts.parameters(recurse=False) if weight.dim() >= 2]
    return max(stacked) if stacked else max(1, len(list(experts.children())))


def _routers(model: "PreTrainedModel", experts: Mapping[str, "nn.Module"]) -> Iterator["nn.Module"]:
    """Yields the modules that choose the experts: the siblings of the expert modules."""
    for beside in dict.fromkeys(name.rpartition(".")[0] for name in experts):
        for name, module in model.get_submodule(beside).named_children():
            if name in ("gate", "router") or "Router" in type(module).__name__:
                yield module


def _looked_up(model: "PreTrainedModel") -> int:
    """Returns the number of parameters of token and position embeddings, without those shared with the output head."""
    from torch import nn

    head = getattr(model.get_output_embeddings(), "weight", None)  # type: ignore[no-untyped-call]
    tables = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(weight.numel() for weight in tables.values() if weight is not head)


def _experts_width(
    model: "PreTrainedModel", experts: Mapping[str, "nn.Module"], chosen: int, hidden: int, *, gated: bool
) -> int:
    """Returns the summed intermediate size of one token's experts in a layer, including shared experts."""
    if not (chosen and hidden):
        return 0
    routed = max(_size(module) * chosen // _number_of_experts(module) for module in experts.values())
    layers = len({name.rpartition(".")[0] for name in experts})
    shared = sum(weight.numel() for name, weight in model.named_parameters() if "shared_" in name and "mlp" in name)
    return (routed + shared // layers) // ((3 if gated else 2) * hidden)


if __name__ == "__main__":
    from huggingface_hub import constants

    die_with_parent()
    # A fork has already imported the Hub's client before its own environment is set.
    constants.HF_HUB_OFFLINE = True
    write_json(
        Path(sys.argv[2]), asdict(counted(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))), durable=False
    )
