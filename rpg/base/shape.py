"""The figures of a decoder that memory and time depend on, from the model itself, built without values.

`python -m rpg.base.shape SETTINGS.json FIGURES.json` reads the settings of a config.json and writes the figures, so
that who plans needs no torch.
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
    """The figures of a decoder that memory and time depend on."""

    parameters: int
    active_parameters: int
    """Parameters without those of the experts that a token is not routed to."""
    matrix_parameters: int
    """Parameters that every token is multiplied with: the active ones, of the embeddings only the output head."""
    expert_parameters: int
    """Parameters of all experts that tokens are routed to."""
    router_parameters: int
    """Parameters of the routers, which choose the experts."""
    largest_weight: int
    """Elements of the largest parameter."""
    linear_widths: dict[str, int]
    """Name of linear modules -> sum of their inputs and outputs; without the output head."""
    hidden_size: int
    layers: int
    key_value_size: int
    """Size of a token's key, of one layer, over all its heads."""
    attention_size: int
    """Size of a token's query, of one layer, over all its heads."""
    intermediate_size: int
    """Width of the MLP; of experts, the widths of one token's together."""
    experts_per_token: int
    """Experts of a layer that a token is routed to; 0: the model has none."""
    vocab_size: int
    context: int
    is_gated: bool
    """Whether the MLP has a gate, as in Llama's descendants; GPT-2's has none."""
    norms_queries: bool
    """Whether queries and keys are normalised, as in Qwen3."""
    traffic: Traffic | None = None
    """Work of a pass; None where it was not counted, or the model does not run on meta tensors."""

    @classmethod
    def of_figures(cls, figures: Mapping[str, Any]) -> "ModelShape":
        """From what `asdict` gives."""
        traffic = figures["traffic"]
        return cls(**{**figures, "traffic": Traffic.of_figures(traffic) if traffic else None})

    @property
    def read_parameters(self) -> int:
        """Parameters that many tokens together are multiplied with: those of all experts."""
        return self.matrix_parameters + self.parameters - self.active_parameters

    def training_flops(self, tokens: int, responses: int, *, pairs: float, frozen: bool = False) -> float:
        """Operations of a forward and a backward pass, recomputation not counted.

        Args:
            tokens: that go through the layers.
            responses: those of them that go through the output head.
            pairs: of tokens that see each other in attention.
            frozen: whether the weights have no gradient, as where adapters are trained.
        """
        head = self.vocab_size * self.hidden_size
        each = 4.0 if frozen else 6.0
        products = tokens * (self.matrix_parameters - head) + responses * head
        return each * products + 12.0 * self.layers * self.attention_size * pairs


def shape_of_config(settings: Mapping[str, Any]) -> ModelShape:
    """The figures of the model that transformers makes of the settings of a config.json; raises what it raises."""
    from rpg.pretrained import config_of_settings, model_without_weights

    return shape_of(model_without_weights(config_of_settings(settings)))


def counted(settings: Mapping[str, Any]) -> ModelShape:
    """The figures with the work of a pass, where the model runs on meta tensors; raises what `shape_of_config` does."""
    shape = shape_of_config(settings)
    try:
        return replace(shape, traffic=traffic_of(settings))
    except Exception:  # architectures that look at values, by errors of their own
        return shape


def shape_of(model: "PreTrainedModel") -> ModelShape:
    """The figures of a model."""
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
    # Where keys are made of a compressed part and a turned one, each head has its own.
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
"""Parts of the names of the matrices by which architectures with a gated MLP are known."""
_QUERY_NORMS = ("q_norm", "query_layernorm", "q_layernorm")
"""Names of what normalises queries."""


def _size(module: "nn.Module") -> int:
    return sum(weight.numel() for weight in module.parameters())


def _holds_experts(name: str, module: "nn.Module") -> bool:
    """Whether a module is all experts of a layer: a list of them, or of a class that has them in one tensor."""
    is_stack = type(module).__name__.endswith("Experts") and "shared" not in name
    is_list = name.rpartition(".")[2] == "experts"
    return (is_stack or is_list) and _size(module) > 0 and not _holds_experts_within(module)


def _holds_experts_within(module: "nn.Module") -> bool:
    return any(_holds_experts(name, inside) for name, inside in module.named_modules() if name)


def _number_of_experts(experts: "nn.Module") -> int:
    """Experts of a layer: a list's length, or the first dimension of the tensor that has them all."""
    stacked = [weight.shape[0] for weight in experts.parameters(recurse=False) if weight.dim() >= 2]
    return max(stacked) if stacked else max(1, len(list(experts.children())))


def _routers(model: "PreTrainedModel", experts: Mapping[str, "nn.Module"]) -> Iterator["nn.Module"]:
    """Modules that choose the experts: they stand beside them."""
    for beside in dict.fromkeys(name.rpartition(".")[0] for name in experts):
        for name, module in model.get_submodule(beside).named_children():
            if name in ("gate", "router") or "Router" in type(module).__name__:
                yield module


def _looked_up(model: "PreTrainedModel") -> int:
    """Parameters of embeddings, of tokens and of positions, that are not the output head's."""
    from torch import nn

    head = getattr(model.get_output_embeddings(), "weight", None)  # type: ignore[no-untyped-call]
    tables = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(weight.numel() for weight in tables.values() if weight is not head)


def _experts_width(
    model: "PreTrainedModel", experts: Mapping[str, "nn.Module"], chosen: int, hidden: int, *, gated: bool
) -> int:
    """Intermediate size of one token's experts of a layer together, as an MLP would have it, shared ones included."""
    if not (chosen and hidden):
        return 0
    routed = max(_size(module) * chosen // _number_of_experts(module) for module in experts.values())
    layers = len({name.rpartition(".")[0] for name in experts})
    shared = sum(weight.numel() for name, weight in model.named_parameters() if "shared_" in name and "mlp" in name)
    return (routed + shared // layers) // ((3 if gated else 2) * hidden)


if __name__ == "__main__":
    from huggingface_hub import constants

    die_with_parent()
    # A fork has imported the Hub's client before it has an environment of its own.
    constants.HF_HUB_OFFLINE = True
    write_json(
        Path(sys.argv[2]), asdict(counted(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))), durable=False
    )
