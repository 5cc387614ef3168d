"""A KV cache of slots for sequences of unequal length. A sequence enters and leaves without copies of the others."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

_GROWTH = 1.5
"""Factor by which a full cache grows, so that the cost of copying is amortised."""

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [sequences, heads, positions, head_dim]."""
KeptRows = list[KeysValues]
"""Keys and values of one sequence, layer by layer, each [heads, positions, head_dim]."""


def caches_all_layers(config: PretrainedConfig) -> bool:
    """Returns whether every layer of the model has full attention, whose keys and values a `SlotCache` can hold."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, [slots, heads, capacity, head_dim]; a slot's sequence begins at position 0."""

    is_sliding = False

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    @property
    def buffers(self) -> KeysValues:
        """Returns keys and values as allocated."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the cache's slots and capacity. Heads, size and type are those of the states."""
        self.keys, self.values = self._zeros(key_states), self._zeros(value_states)
        self.is_initialized = True

    def _zeros(self, like: Tensor) -> Tensor:
        # Zeros, not empty: masked positions still enter the product with weight 0, and 0 * NaN is NaN.
        return like.new_zeros((self._cache.slots, like.shape[1], self._cache.capacity, like.shape[3]))

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> KeysValues:
        """Writes one token's states [active, heads, 1, dim] at the end of each sequence. Returns the window over all
        sequences."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.buffers
        rows, ends, width, active = self._cache.rows, self._cache.ends, self._cache.width, key_states.shape[0]
        keys[rows, :, ends] = key_states[:, :, 0]
        values[rows, :, ends] = value_states[:, :, 0]
        return keys[:active, :, :width], values[:active, :, :width]

    def resize(self) -> None:
        """Moves keys and values to new buffers with the cache's present number of slots and capacity."""
        if self.is_initialized:
            smaller = self.buffers
            self.lazy_initialization(*smaller)
            for new, old in zip(self.buffers, smaller, strict=True):
                slots = min(new.shape[0], old.shape[0])
                new[:slots, :, : old.shape[2]] = old[:slots]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002  # transformers' signature
        """Returns the number of keys that the query sees, and the offset of the first."""
        return self._cache.width, 0

    def get_seq_length(self) -> int:
        """Returns the length of the longest active sequence, without the new token."""
        return max(self._cache.width - 1, 0)

    def get_max_length(self) -> int:
        """Returns -1, because the cache grows on demand."""
        return -1


class SlotCache(Cache):
    """The cache of all layers. `aim` sets where each active sequence's next token goes. The model then updates the
    cache."""

    def __init__(self, num_layers: int, *, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.rows, self.ends, self.width = torch.empty(0), torch.empty(0), 0
        self._slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=[*self._slot_layers])

    def aim(self, rows: Tensor, ends: Tensor, *, width: int) -> None:
        """Makes the next update write slot rows[i] at position ends[i], with a window `width` positions wide."""
        self.rows, self.ends, self.width = rows, ends, width

    def reserve(self, *, slots: int, width: int) -> None:
        """Makes room for `width` positions, and for `slots` slots if there are fewer. A buffer that is too narrow is
        replaced by one with `slots` slots."""
        if width > self.capacity or slots > self.slots:
            wider = max(width, int(self.capacity * _GROWTH)) if width > self.capacity else self.capacity
            self.slots, self.capacity = slots, wider
            for layer in self._slot_layers:
                layer.resize()

    def admit(self, slots: Tensor, source: list[KeysValues], rows: Tensor, *, length: int) -> None:
        """Copies the first `length` positions of the source's rows into slots.

        A row may be copied to many slots, so that the responses of a group share the states of their prompt.
        """
        for layer, states in zip(self._slot_layers, source, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(*states)
            for buffer, state in zip(layer.buffers, states, strict=True):
                buffer[slots, :, :length] = state[rows, :, :length]

    def rows_of(self, slot: int, length: int) -> KeptRows:
        """Returns a copy of the first `length` positions of a slot."""
        return [
            tuple(buffer[slot, :, :length].clone() for buffer in layer.buffers)  # type: ignore[misc]
            for layer in self._slot_layers
        ]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies the window's positions of slots to other slots."""
        for layer in self._slot_layers:
            for buffer in layer.buffers:
                buffer[targets, :, : self.width] = buffer[sources, :, : self.width]


class ReturningContexts:
    """Kept rows of sequences that have left their slots. If a later context begins with such a sequence, only the rest
    of that context is computed."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[tuple[int, ...], KeptRows]] = OrderedDict()
        """Hash of the tokens -> tokens and rows, the oldest first."""
        self._positions = 0

    def keep(self, token_ids: tuple[int, ...], rows: KeptRows) -> None:
        """Keeps the rows of these tokens, at least one."""
        *_, key = _hashes(token_ids)
        if key not in self._kept:
            self._kept[key] = token_ids, rows
            self._positions += len(token_ids)
        self._kept.move_to_end(key)

    def shrink(self, positions: int) -> None:
        """Drops the oldest rows until at most this number of positions is kept."""
        while self._kept and self._positions > positions:
            _, (dropped, _) = self._kept.popitem(last=False)
            self._positions -= len(dropped)

    def of(self, token_ids: Sequence[int]) -> KeptRows:
        """Returns the rows of the longest prefix of a context that is kept; empty if no prefix is kept. The prefix
        never includes the context's last two tokens."""
        hashes = list(_hashes(token_ids[:-2])) if self._kept else []
        for length in range(len(hashes), 0, -1):
            known, rows = self._kept.get(hashes[length - 1], ((), []))
            if rows and known == tuple(token_ids[:length]):
                return rows
        return []


def _hashes(token_ids: Sequence[int]) -> Iterator[int]:
    """Yields the hash of each prefix of the tokens, from the first token to all of them, in a single pass."""
    so_far = 0
    for token in token_ids:
        so_far = hash((so_far, token))
        yield so_far


def laid_out(sequences: Sequence[KeptRows]) -> list[KeysValues]:
    """Returns the rows of several sequences as one batch, layer by layer. Shorter sequences are padded with zeros at
    the end."""
    return [
        tuple(
            pad_sequence([rows[layer][part].transpose(0, 1) for rows in sequences], batch_first=True).transpose(1, 2)
            for part in range(2)
        )  # type: ignore[misc]
        for layer in range(len(sequences[0]))
    ]
