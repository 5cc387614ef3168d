"""Which activations a layer keeps for its backward pass, where it recomputes some of them.

A layer that keeps nothing but its input is computed a second time whole: a third more arithmetic. Nearly all of that is
in matrix products and attention, and more than half of the memory in what lies between them: norms, rotations, the
gate. So one keeps the results of the former and recomputes the latter, by the reasoning of Korthikanti 2022,
arXiv:2205.05198.
"""

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
"""Products with weights. Batched products are not among them: in attention that is written out, each has a number for
every pair of tokens."""
_NARROW = 16
"""A product with a weight that is more than so many times as wide as high is recomputed: it costs little, and its
result takes as much room as any. The second factor of an adapter is such a weight."""


def recompute_activations(model: PreTrainedModel, *, selective: bool) -> None:
    """Has each layer of the model keep its input alone and recompute the rest in its backward pass; if `selective`, it
    keeps the results of matrix products and attention too. The gradient is the same in every bit."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if selective:
        settings["context_fn"] = _contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def _contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Contexts around a layer's forward pass, and around its recomputation."""
    forward, recomputation = create_selective_checkpoint_contexts(list(_operations()))  # type: ignore[no-untyped-call]
    return _Chosen(forward), _Chosen(recomputation)


@cache
def _operations() -> frozenset[Any]:
    """Products with weights, and what PyTorch's attention may be, that of packed rows included."""
    import torch.nn.attention.varlen  # which defines the last

    aten = torch.ops.aten
    attentions = (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
    )
    return frozenset((*_PRODUCTS, *attentions))


class _Chosen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows torch's own context only the operations whose results are kept.

    That context refuses a recomputation that calls what the forward pass did not. At ZeRO 3 it may: which layer's pass
    gathers which weights depends on those that are there already.
    """

    def __init__(self, context: TorchDispatchMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._context = context

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if operation in _operations() and not (operation in _PRODUCTS and _is_narrow(arguments[-1])):
            return self._context.__torch_dispatch__(operation, types, arguments, keywords)  # type: ignore[no-untyped-call]
        return operation(*arguments, **(keywords or {}))


def _is_narrow(weight: torch.Tensor) -> bool:
    """Whether a product with a weight [height, width] is recomputed, see _NARROW."""
    height, width = weight.shape
    return width > _NARROW * height
