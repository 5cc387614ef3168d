"""A KV cache of slots: sequences of unequal length side by side, entering and leaving without the others being copied."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_GROWTH = 1.5
"""Factor by which a full cache grows, so that the copying is amortised."""


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [slots, heads, capacity, head_dim]; slot i's sequence stands at positions 0 to its length."""

    is_sliding = False

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for the cache's slots and capacity, with heads and types of the states [batch, heads, time, dim]."""
        self.keys, self.values = self._empty(key_states), self._empty(value_states)
        self.is_initialized = True

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros, not empty: masked positions still enter the product with weight 0, and 0 * NaN is NaN.
        shape = (self._cache.slots, like.shape[1], self._cache.capacity, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes one token's states [active, heads, 1, dim] at each sequence's end; returns the active window."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        rows, ends, width = self._cache.rows, self._cache.ends, self._cache.width
        self.keys[rows, :, ends] = key_states[:, :, 0]
        self.values[rows, :, ends] = value_states[:, :, 0]
        active = key_states.shape[0]
        return self.keys[:active, :, :width], self.values[:active, :, :width]

    def resize(self, slots: int, capacity: int) -> None:
        """Moves what the first `slots` slots hold to buffers of the new size."""
        if self.keys is None or self.values is None:
            return
        old_keys, old_values = self.keys, self.values
        self.lazy_initialization(old_keys, old_values)
        kept = min(slots, old_keys.shape[0])
        self.keys[:kept, :, : old_keys.shape[2]] = old_keys[:kept]
        self.values[:kept, :, : old_values.shape[2]] = old_values[:kept]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that the query sees, offset of the first)."""
        return self._cache.width, 0

    def get_seq_length(self) -> int:
        """Of the longest active sequence, the new token not counted."""
        return max(self._cache.width - 1, 0)

    def get_max_length(self) -> int:
        """-1: grows on demand."""
        return -1


class SlotCache(Cache):  # type: ignore[misc]  # transformers ships no types
    """The cache of all layers. `aim` says where the next token of each active sequence goes; the model then updates it."""

    def __init__(self, num_layers: int, *, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.rows, self.ends, self.width = torch.empty(0), torch.empty(0), 0
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])

    def aim(self, rows: Tensor, ends: Tensor, *, width: int) -> None:
        """The next update writes slot rows[i] at position ends[i], and its window is `width` positions wide."""
        self.rows, self.ends, self.width = rows, ends, width

    def reserve(self, *, slots: int, width: int) -> None:
        """Room for `width` positions; a buffer too narrow is replaced by one of `slots` slots."""
        if width <= self.capacity:
            return
        self.slots, self.capacity = slots, max(width, int(self.capacity * _GROWTH))
        for layer in self.layers:
            layer.resize(self.slots, self.capacity)

    def admit(self, slots: Tensor, source: Cache, source_rows: Tensor, *, length: int) -> None:
        """Copies the first `length` positions of the source's rows into the slots; rows may repeat: that is the sharing."""
        for layer, given in zip(self.layers, source.layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(given.keys, given.values)
            layer.keys[slots, :, :length] = given.keys[source_rows, :, :length]
            layer.values[slots, :, :length] = given.values[source_rows, :, :length]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole slots, so that the active ones stand in front."""
        for layer in self.layers:
            layer.keys[targets, :, : self.width] = layer.keys[sources, :, : self.width]
            layer.values[targets, :, : self.width] = layer.values[sources, :, : self.width]
