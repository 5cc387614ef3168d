"""Attention of one new token per sequence over the cache. Keys are not repeated for grouped queries."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "rpg_decode"
"""Name under which transformers models find it."""


def decode_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes transformers' attention. For a single token, queries that share a key are put on the time axis.

    Given a mask, transformers' own attention repeats keys and values for each query head, which copies the cache at
    every token. Shapes as there: query [batch, query heads, 1, dim], key and value [batch, key heads, positions, dim],
    mask [batch, 1, 1, positions]; returns [batch, 1, query heads, dim].
    """
    batch, heads, time, dim = query.shape
    if time > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return,unused-ignore]
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, decode_attention)
