"""Attention over several sequences in one row: each token sees only its own sequence, and nothing is padded.

All other parts of a decoder work on single tokens. So a row of sequences laid end to end costs only its tokens, and a
prompt that several responses continue costs its tokens once.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import signature
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from rpg.pretrained import is_installed

ATTENTION = "rpg_packed"
"""Name of this attention for transformers models."""
LONG = 512
"""Smallest number of a response's queries for which a causal kernel is used. For so many, the kernel saves more time by
skipping keys that no query sees than it loses by computing zero queries in place of the prompt."""


NEWER_FLASH = {"FA3": ("flash_attn_interface", (9,)), "FA4": ("flash_attn.cute.interface", (9, 10))}
"""torch's name of a newer flash attention -> its module, and the major compute capabilities of the GPUs on which it
runs. The first usable one is chosen."""
_LARGEST_ERROR = 0.05
"""Largest accepted relative difference, in norm, between this attention and PyTorch's kernel, and between their
gradients. Rounding to bfloat16 gives 0.01."""


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """A contiguous piece of a row: a prompt, a response, or both together."""

    length: int
    prompt: range = range(0)
    """Positions, in the row, of the prompt that the segment continues; empty unless the prompt is a separate
    segment."""


class Packing:
    """The sequences of a packed row.

    Args:
        families: for each prompt in the row its length, then the lengths of the responses that follow and continue it.
            A sequence of another kind is a prompt without responses.
    """

    def __init__(self, families: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self.families = families
        self.segments = tuple(_segments(families))
        self.blocks = tuple((segment, len(list(alike))) for segment, alike in groupby(self.segments))
        """Groups of equal neighbouring segments, whose attention is computed together: the first segment of each group,
        and their number."""
        self.layers = 0
        """Number of layers whose attention has used this packing so far."""
        self._device = device
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    @cached_property
    def position_ids(self) -> Tensor:
        """Returns the position of each of this rank's tokens in its sequence. [1, tokens]"""
        return self.places

    @cached_property
    def places(self) -> Tensor:
        """Returns the position of each token in its sequence. [1, tokens]"""
        places = [torch.arange(each.length) + len(each.prompt) for each in self.segments]
        return torch.cat(places)[None].to(self._device, non_blocking=True)

    @cached_property
    def keys(self) -> Tensor | None:
        """Returns the positions, in the row, of the keys that each segment may see, segment by segment: those of its
        prompt, then its own. None if these are simply the row's positions."""
        if not any(each.prompt for each in self.segments):
            return None
        ends = accumulate(each.length for each in self.segments)
        positions = [
            torch.arange(part.start, part.stop)
            for each, end in zip(self.segments, ends, strict=True)
            for part in (each.prompt, range(end - each.length, end))
        ]
        return torch.cat(positions).to(self._device, non_blocking=True)

    @cached_property
    def query_bounds(self) -> Tensor:
        """Returns the start of each segment, and the end of the last one. [segments + 1], int32"""
        return self._bounds([each.length for each in self.segments])

    @cached_property
    def key_bounds(self) -> Tensor:
        """Returns the bounds of the segments among `keys`. [segments + 1], int32"""
        return self._bounds([each.length + len(each.prompt) for each in self.segments])

    def _bounds(self, lengths: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(self._device, non_blocking=True)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None
    ) -> Tensor:
        """Returns attention, causal within each sequence. Shapes as in `packed_attention`."""
        return _attend(query, key, value, self, scaling, sliding_window)

    def mask(self, queries: int, keys: int, window: int | None, like: Tensor) -> Tensor | None:
        """Returns the mask to add to the scores. The last query corresponds to the last key. None if plain causality
        suffices.

        All layers and all responses to a prompt share one mask, which is kept until their backward pass.
        """
        offset = keys - queries
        if not offset and (window is None or keys <= window):
            return None
        mask = self._masks.get((offset, window))
        if mask is None or len(mask) < queries:
            unseen = torch.full((queries, keys), -torch.inf, dtype=like.dtype, device=like.device)
            mask = unseen.triu(offset + 1)
            if window is not None:
                mask += unseen.tril(offset - window)
            self._masks[offset, window] = mask
        return mask[:queries, :keys]


def _segments(families: tuple[tuple[int, ...], ...]) -> Iterator[PackedSegment]:
    start = 0
    for prompt, *responses in families:
        if len(responses) < 2:
            yield PackedSegment(prompt + sum(responses))
        else:
            yield PackedSegment(prompt)
            yield from (PackedSegment(length, range(start, start + prompt)) for length in responses)
        start += prompt + sum(responses)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns attention that is causal within each sequence of a packed row. Without `packing`, returns transformers'
    own attention.

    Shapes as in transformers: query [1, query heads, tokens, dim], key and value [1, key heads, tokens, dim]; returns
    [1, tokens, query heads, dim].
    """
    if packing is None and attention_mask is None and sliding_window is not None:
        # transformers builds no masks, not even of windows, for an attention that it does not know.
        rows = Packing(((query.shape[2],),), query.device)
        return _causal(query, key, value, rows, scaling, sliding_window).transpose(1, 2), None
    if packing is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return,unused-ignore]
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    packing.layers += 1
    return packing.attend(query, key, value, scaling, sliding_window), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, sliding_window: int | None
) -> Tensor:
    size = query.shape[3]
    if query.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256 and _has_flash(query.device):
        return _flash(query, key, value, packing, scaling, sliding_window)
    parts, prompt = [], (key, value)
    pieces = (_pieces(states, packing) for states in (query, key, value))
    for (segment, _), q, k, v in zip(packing.blocks, *pieces, strict=True):
        if segment.prompt:
            k, v = _behind(prompt[0], k), _behind(prompt[1], v)
        else:
            prompt = k[-1:], v[-1:]  # the prompt of the responses that follow, if any
        parts.append(_causal(q, k, v, packing, scaling, sliding_window).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[None]


def _pieces(states: Tensor, packing: Packing) -> Iterator[Tensor]:
    """Yields the blocks of a row. [1, heads, tokens, dim] -> [count, heads, length, dim] each

    They are cut in one operation: the gradient of each single slice would be a row of zeros around it.
    """
    sizes = [segment.length * count for segment, count in packing.blocks]
    for piece, (segment, count) in zip(states[0].split_with_sizes(sizes, dim=1), packing.blocks, strict=True):
        yield piece.view(len(piece), count, segment.length, -1).transpose(0, 1)


def _behind(prompt: Tensor, responses: Tensor) -> Tensor:
    """Returns the prompt concatenated before each response. [1, heads, p, dim] and [n, heads, r, dim] -> [n, heads, p +
    r, dim]"""
    return torch.cat([prompt.expand(len(responses), -1, -1, -1), responses], dim=2)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """Returns causal attention. [count, heads, length, dim]

    The last query is aligned with the last key, and each query sees `window` keys up to its own."""
    queries, ahead = query.shape[2], key.shape[2] - query.shape[2]
    if window is None and queries >= LONG and 0 < ahead < queries:
        # Zero queries replace the prompt's, so that plain causality holds and the kernel needs no mask.
        whole = pad(query, (0, 0, ahead, 0))
        return _causal(whole, key, value, packing, scaling, window)[:, :, ahead:]
    mask = packing.mask(queries, key.shape[2], window, query)
    if query.is_cuda:
        # Inputs here are in float32 or have a mask. Among torch's kernels for these only the plain one, which holds the
        # scores of all pairs, lets query heads share keys.
        key, value = (repeat_kv(states, query.shape[1] // key.shape[1]) for states in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=not query.is_cuda
    )


@cache
def _has_flash(device: torch.device) -> bool:
    """Returns whether PyTorch's kernel for sequences of unequal length runs on the device, a GPU of compute capability
    8.0 or more."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """Calls PyTorch's kernel for sequences of unequal length. It accepts head sizes that are multiples of 8, up to 256.

    There too a segment's last query is aligned with its last key, so a response sees all of its prompt.
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    if packing.keys is not None:
        k, v = (states.index_select(0, packing.keys) for states in (k, v))
    output = varlen_attn(
        q,
        k,
        v,
        packing.query_bounds,
        packing.key_bounds,
        max(each.length for each in packing.segments),
        max(each.length + len(each.prompt) for each in packing.segments),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **_shared_keys(),
    )
    assert isinstance(output, Tensor)
    return output[None]


def newer_flash(major: int) -> str:
    """Returns the name of a newer flash attention that is installed and runs on GPUs of this major compute capability;
    empty if none does."""
    fitting = (name for name, (module, majors) in NEWER_FLASH.items() if major in majors and is_installed(module))
    return next(fitting, "")


@cache
def use_newer_flash(device: torch.device) -> None:
    """Makes PyTorch compute attention, including that over sequences of unequal length, with FlashAttention 3 or 4
    (Shah 2024, arXiv:2407.08608), if one is installed and correct."""
    if device.type == "cuda" and (name := newer_flash(torch.cuda.get_device_capability(device)[0])):
        activate_if_right(name, device, torch.bfloat16)


def activate_if_right(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Activates a newer flash attention in this process, unless it fails, or changes the attention or gradient of a
    small row."""
    expected = _small_row(device, dtype)
    try:
        torch.nn.attention.activate_flash_attention_impl(name)
        pairs = zip(_small_row(device, dtype), expected, strict=True)
        error = max(float((found - right).norm() / right.norm()) for found, right in pairs)
        if error < _LARGEST_ERROR:
            return True
        why = f"a gradient or result is off by {error:.2g}"
    except Exception as failure:  # any error of the package on this machine
        why = str(failure)
    torch.nn.attention.restore_flash_attention_impl()
    logging.getLogger(__name__).warning("%s is installed but not used: %s", name, why)
    return False


def _small_row(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Returns the attention of two responses to a prompt after another sequence, and its gradient, in float32."""
    packing = Packing(((24,), (40, 64, 24)), device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, 152, 64) for heads in (4, 2, 2)]
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes)
    result = packing.attend(query, key, value, None, None)
    gradients = torch.autograd.grad(result.float().square().sum(), [query, key, value])
    return [each.detach().float() for each in (result, *gradients)]


@cache
def _shared_keys() -> dict[str, Any]:
    """Returns the kernel's options for query heads that share keys. Before torch 2.12 the kernel needs no option for
    them."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


AttentionInterface.register(ATTENTION, packed_attention)
