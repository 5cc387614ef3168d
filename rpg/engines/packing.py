"""Attention over several sequences in one row: each token sees its own sequence alone, and nothing is padded.

All else in a decoder works on single tokens, so that a row of sequences laid end to end costs what its tokens cost.
"""

from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "rpg_packed"
"""The name under which transformers models find it."""


@dataclass(slots=True)
class Packing:
    """Which sequences a row holds."""

    lengths: tuple[int, ...]
    """Tokens of each, in the order of the row. Equal neighbours are attended to together."""
    bounds: Tensor
    """Where each begins, and where the last one ends. [sequences + 1], int32"""
    layers: int = 0
    """Layers that have kept to it so far."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> "Packing":
        """Of sequences of these lengths."""
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, bounds.to(device, non_blocking=True))

    @property
    def position_ids(self) -> Tensor:
        """Each token's place in its sequence. [1, tokens]"""
        device = self.bounds.device
        return torch.cat([torch.arange(length, device=device) for length in self.lengths])[None]


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
    """transformers' attention, causal within each sequence of a packed row; without `packing` it is transformers' own.

    Shapes as there: query [1, query heads, tokens, dim], key and value [1, key heads, tokens, dim]; returns
    [1, tokens, query heads, dim].
    """
    if packing is None and attention_mask is None and sliding_window is not None:
        # transformers makes no masks for an attention that it does not know, of windows either.
        return _causal(query, key, value, scaling, sliding_window).transpose(1, 2), None
    if packing is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return,unused-ignore]
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    packing.layers += 1
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, packing, scaling, sliding_window), None
    parts, start = [], 0
    for length, neighbours in groupby(packing.lengths):
        count = len(list(neighbours))
        q, k, v = (_apart(states, start, count, length) for states in (query, key, value))
        parts.append(_causal(q, k, v, scaling, sliding_window).transpose(1, 2).flatten(0, 1))
        start += count * length
    return torch.cat(parts)[None], None


def _apart(states: Tensor, start: int, count: int, length: int) -> Tensor:
    """`count` sequences of a row as a batch. [1, heads, tokens, dim] -> [count, heads, length, dim]"""
    _, heads, _, dim = states.shape
    return states[0, :, start : start + count * length].reshape(heads, count, length, dim).transpose(0, 1)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """[count, heads, length, dim]; a token sees the `window` tokens up to itself, or all."""
    mask, length = None, query.shape[2]
    if window is not None and window < length:
        distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
        mask = (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """By PyTorch's kernel for sequences of unequal length: one call, whatever their number."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    longest = max(packing.lengths)
    output = varlen_attn(
        q,
        k,
        v,
        packing.bounds,
        packing.bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(output, Tensor)
    return output[None]


AttentionInterface.register(ATTENTION, packed_attention)
