"""Selects the activations that a layer keeps for its backward pass. The others are recomputed.

A layer that keeps only its input is recomputed completely: a third more arithmetic. Nearly all of that arithmetic is in
matrix products and attention; more than half of the memory is in the operations between them: norms, rotations, the
gate. So selective recomputation keeps the results of the former and recomputes the latter, as Korthikanti 2022,
arXiv:2205.05198, argues.
"""

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
"""Products with weights. Batched products are excluded: in attention that is written as plain operations, they have a
value for every pair of tokens."""
_NARROW = 16
"""A product with a weight is recomputed if the weight's aspect ratio (width over height) is above this. Such a product
costs little, and its result takes as much memory as others. The second factor of an adapter is such a weight."""


def recompute_activations(model: PreTrainedModel, *, selective: bool) -> None:
    """Makes each layer of the model keep only its input and recompute the rest in its backward pass.

    If `selective`, it also keeps the results of matrix products and attention. The gradient is the same in every
    bit."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if selective:
        settings["context_fn"] = _contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def _contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Returns the contexts for a layer's forward pass and for its recomputation."""
    forward, recomputation = create_selective_checkpoint_contexts(list(_operations()))  # type: ignore[no-untyped-call]
    return _Chosen(forward), _Chosen(recomputation)


@cache
def _operations() -> frozenset[Any]:
    """Returns products with weights and the operations of PyTorch's attention, including that of packed rows."""
    import torch.nn.attention.varlen  # which defines the last operation

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
    """Dispatch mode that passes on to torch's own context only the operations whose results are kept.

    That context refuses a recomputation that calls other operations than the forward pass. At ZeRO 3 it may do so:
    which weights a layer's pass gathers depends on those that are already gathered.
    """

    def __init__(self, context: TorchDispatchMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._context = context

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if operation in _operations() and not (operation in _PRODUCTS and _is_narrow(arguments[-1])):
            return self._context.__torch_dispatch__(operation, types, arguments, keywords)  # type: ignore[no-untyped-call]
        return operation(*arguments, **(keywords or {}))


def _is_narrow(weight: torch.Tensor) -> bool:
    """Returns whether a product with a weight [height, width] is recomputed; see _NARROW."""
    height, width = weight.shape
    return width > _NARROW * height
