"""Counts a training pass's operations and memory traffic by running the real model on meta tensors.

Nothing is computed: the counter sees every operation that a GPU would run, with the shapes of its tensors. A roofline
turns these counts into time, see `pipelines.planning.roofline`.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

TOKENS = 16384
"""Number of tokens in the counted pass."""
_MOST_OPERATIONS = 20_000
"""Largest number of operations in a pass. A model with more loops over tokens in Python and is not counted."""
_ROTATION = "apply_rotary_pos_emb"
"""Name in transformers of the function that rotates queries and keys."""
_LOOK_UPS = frozenset({"embedding", "gather", "index_select", "index"})
"""Operations that read only as much of their first tensor as they write."""
_FREE = frozenset({"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "detach", "lift_fresh"})
"""Operations that touch no memory."""
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})
_LOGITS_OF_KERNEL = (4, 6)
"""Bytes that the kernel between the head's matrix products moves for each logit. The forward pass reads float32 logits;
the backward pass reads them again and writes their gradient in bfloat16."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a pass, per token."""

    flops: float
    """Operations of matrix products with weights."""
    bytes_moved: float
    """Bytes read and written in bfloat16 by all other operations except attention."""

    def with_further(self, two: "Work", count: int) -> "Work":
        """Returns the work with `count` further layers. `two` is the work with one further layer."""
        return Work(
            self.flops + count * (two.flops - self.flops),
            self.bytes_moved + count * (two.bytes_moved - self.bytes_moved),
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """The work of a model's forward and backward pass per token, in bfloat16, without attention over pairs of tokens
    and recomputation in layers."""

    forward: Work
    backward: Work
    fused_forward: Work
    """Forward work with one kernel each for norms, rotations and gates."""
    fused_backward: Work
    head_forward: Work
    """Forward work of the output head with logprob and entropy, per response token."""
    head_backward: Work
    kernel_head_forward: Work
    """Forward work of the head if one kernel computes logprob and entropy from logits."""
    kernel_head_backward: Work

    @classmethod
    def of_figures(cls, figures: Mapping[str, Mapping[str, float]]) -> "Traffic":
        """Builds the traffic from the result of `asdict`."""
        return cls(**{name: Work(**work) for name, work in figures.items()})


class _Counter:
    """A counter of the work of all operations since the last `take`."""

    def __init__(self) -> None:
        self.flops = self.moved = 0.0
        self._operations = 0

    def see(self) -> None:
        """Counts an operation. Raises RuntimeError if there are too many."""
        self._operations += 1
        if self._operations > _MOST_OPERATIONS:
            raise RuntimeError(f"more than {_MOST_OPERATIONS} operations")

    def move(self, tensors: Iterable["Tensor"]) -> None:
        """Counts the bytes of tensors. An expanded tensor counts only with its stored bytes."""
        for tensor in tensors:
            held = math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
            self.moved += held * tensor.element_size()

    def take(self, tokens: int) -> Work:
        work = Work(flops=self.flops / tokens, bytes_moved=self.moved / tokens)
        self.flops = self.moved = 0.0
        return work


def traffic_of(settings: Mapping[str, Any], *, tokens: int = TOKENS) -> Traffic:
    """Returns the traffic of the model that transformers builds from a config.json's settings. Raises transformers'
    exceptions."""
    from rpg.pretrained import config_of_settings, model_without_weights

    model = model_without_weights(config_of_settings(settings))
    model.bfloat16()
    model.train()
    forward, backward = _all_layers(model, tokens)
    with _fused(model):
        fused_forward, fused_backward = _all_layers(model, tokens)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    head_forward, head_backward = _head(head.weight, tokens)
    logits = head.weight.shape[0]
    return Traffic(
        forward=forward,
        backward=backward,
        fused_forward=fused_forward,
        fused_backward=fused_backward,
        head_forward=head_forward,
        head_backward=head_backward,
        kernel_head_forward=Work(head_forward.flops, _LOGITS_OF_KERNEL[0] * logits),
        kernel_head_backward=Work(head_backward.flops, _LOGITS_OF_KERNEL[1] * logits),
    )


def _all_layers(model: "PreTrainedModel", tokens: int) -> tuple[Work, Work]:
    """Runs a forward and a backward pass. If there are many identical layers, runs two of them, and the second's work
    counts for all further layers."""
    from torch import nn

    name, layers = next(
        ((name, list(module.children())) for name, module in model.base_model.named_children() if _are_alike(module)),
        ("", []),
    )
    if not layers:
        return _layers(model, tokens)
    try:
        counted = []
        for count in (1, 2):
            setattr(model.base_model, name, nn.ModuleList(layers[:count]))
            counted.append(_layers(model, tokens))
    finally:
        setattr(model.base_model, name, nn.ModuleList(layers))
    (forward, backward), two = counted
    further = len(layers) - 1
    return forward.with_further(two[0], further), backward.with_further(two[1], further)


def _are_alike(module: "nn.Module") -> bool:
    """Returns whether a module is a list of at least three identical layers."""
    from torch import nn

    if not isinstance(module, nn.ModuleList) or len(module) < 3:
        return False
    parts = [
        [
            (name, type(part), *(weight.shape for weight in part.parameters(recurse=False)))
            for name, part in layer.named_modules()
        ]
        for layer in module
    ]
    return all(each == parts[0] for each in parts)


def _layers(model: "PreTrainedModel", tokens: int) -> tuple[Work, Work]:
    import torch
    from transformers import AttentionInterface

    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    AttentionInterface.register("counted", _attention)
    model.config._attn_implementation = "counted"
    with counting() as counter:
        hidden = model.base_model(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
        forward = counter.take(tokens)
        hidden.backward(torch.empty_like(hidden))
        backward = counter.take(tokens)
    model.zero_grad(set_to_none=True)
    return forward, backward


def _head(weight: "Tensor", tokens: int) -> tuple[Work, Work]:
    import torch

    from rpg.learner.logprobs import CHUNK_ON_GPU, multiplies_into_float32, token_logprobs

    hidden = torch.empty(tokens, weight.shape[1], dtype=weight.dtype, device="meta", requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64, device="meta")
    multiplies_into_float32(weight.device)  # which tests it, once per process
    with counting() as counter:
        logprobs, _ = token_logprobs(hidden, weight, targets, chunk=CHUNK_ON_GPU)
        forward = counter.take(tokens)
        logprobs.backward(torch.empty_like(logprobs))  # type: ignore[no-untyped-call]
        return forward, counter.take(tokens)


@contextmanager
def counting() -> Iterator[_Counter]:
    """Counts all operations in the block."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            out = operation(*arguments, **(keywords or {}))
            counter.see()
            name = operation.overloadpacket.__name__
            if operation.is_view or name in _FREE:
                return out
            if name in _PRODUCTS:
                left, right = arguments[1:3] if name in ("addmm", "baddbmm") else arguments[:2]
                counter.flops += 2 * left.numel() * right.shape[-1]
                return out
            read = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
            written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            if name in _LOOK_UPS:
                read[:1] = written
            elif name.rstrip("_") in ("copy", "fill", "zero"):
                read[:1] = []  # it is written over
            elif name in ("scatter_add", "scatter_add_", "index_add_"):
                read[0] = read[-1]
                written = read[-1:]
            counter.move([*read, *written])
            return out

    counter = _Counter()
    with Mode():  # type: ignore[no-untyped-call]
        yield counter


def _one_kernel(outputs: int, inputs: tuple["Tensor", ...], *, keeps: bool = True) -> tuple["Tensor", ...]:
    """Imitates the traffic of a fused kernel. Results have the shapes of the first inputs, and each tensor is read or
    written once. The backward pass reads the results' gradients, also the inputs if it `keeps` them, and writes the
    inputs' gradients."""
    import torch

    class OneKernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: "Tensor") -> tuple["Tensor", ...]:
            ctx.save_for_backward(*inputs)
            results = tuple(torch.empty_like(each) for each in inputs[:outputs])
            _touch([*inputs, *results])
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: "Tensor") -> tuple["Tensor", ...]:
            inputs = ctx.saved_tensors
            results = tuple(torch.empty_like(each) for each in inputs)
            _touch([*gradients, *results, *(inputs if keeps else ())])
            return results

    return OneKernel.apply(*inputs)  # type: ignore[no-any-return,no-untyped-call]


def _touch(tensors: list["Tensor"]) -> None:
    """Makes the counter count tensors as read or written once, by an operation that only writes one of them."""
    for tensor in tensors:
        tensor.detach().zero_()


def _attention(
    _module: "nn.Module", query: "Tensor", key: "Tensor", value: "Tensor", *_: Any, **__: Any
) -> tuple["Tensor", None]:
    """Returns tensors with the shapes that transformers' attention returns. The tensors are counted, the arithmetic
    over pairs is not."""
    (out, *_rest) = _one_kernel(1, (query, key, value))
    return out[..., : value.shape[-1]].transpose(1, 2), None


@contextmanager
def _fused(model: "PreTrainedModel") -> Iterator[None]:
    """Replaces the model's norms, rotations and gates within the block by one kernel each, as Liger does."""
    modeling = sys.modules[type(model).__module__]
    rotation = getattr(modeling, _ROTATION, None)
    changed = [module for module in model.modules() if _fused_forward(module)]
    for module in changed:
        module.forward = _fused_forward(module)  # type: ignore[assignment]
    if rotation:
        setattr(modeling, _ROTATION, lambda query, key, *_, **__: _one_kernel(2, (query, key), keeps=False))
    try:
        yield
    finally:
        for module in changed:
            del module.forward
        if rotation:
            setattr(modeling, _ROTATION, rotation)


def _fused_forward(module: Any) -> Callable[["Tensor"], "Tensor"] | None:
    """Returns a forward pass with one kernel for the operations that Liger fuses; None if Liger fuses nothing here."""
    if type(module).__name__.endswith("RMSNorm"):
        return lambda hidden: _one_kernel(1, (hidden, module.weight))[0]
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return lambda hidden: module.down_proj(_one_kernel(1, (module.gate_proj(hidden), module.up_proj(hidden)))[0])
    return None
