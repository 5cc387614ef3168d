"""Sequence parallelism: several ranks share each row of a pass, for sequences too long for one rank's memory.

The method is DeepSpeed-Ulysses, Jacobs 2023, arXiv:2309.14509. A rank computes a piece of the row in all layers, and in
attention the whole row for its share of the heads; the ranks exchange pieces for heads before each attention and back
after it. ZeRO still spans all ranks, and only the learner knows that rows are shared: the first rank of a group has the
responses, the losses and the recorded rows, and the others help with its passes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from rpg.learner.packing import Packing
from rpg.processes import ranks
from specs.errors import Issue, SpecError

Policy = Callable[..., tuple[Tensor, Tensor]]


class SequenceGroup:
    """A group of neighbouring ranks, including this one, that compute each pass together. All ranks make the same
    calls."""

    def __init__(self, size: int, config: PretrainedConfig) -> None:
        """Forms the group of this rank. All ranks call it.

        Args:
            size: ranks in a group, a divisor of their number. Neighbouring ranks form a group, best on one machine.
            config: config of the model, whose heads are divided among the ranks.
        Raises:
            SpecError: the ranks do not form whole groups, or the heads cannot be divided.
        """
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        if ranks.world_size() % size:
            given = f"{size} of {ranks.world_size()} ranks"
            path = ("training", "sequence_parallel_size")
            raise SpecError(Issue("the ranks do not divide into whole groups", path, given))
        text = config.get_text_config()
        heads = text.num_attention_heads
        key_heads = getattr(text, "num_key_value_heads", None) or heads
        check_heads(size, heads=heads, key_heads=key_heads)
        self.size = size
        self.first = ranks.rank() // size * size
        starts = range(0, ranks.world_size(), size)
        self._group = [dist.new_group(list(range(start, start + size))) for start in starts][ranks.rank() // size]
        self._attention = UlyssesSPAttentionHF(
            attn=_attend_with_some_heads,
            batch_size=1,
            attn_head_count=heads,
            attn_head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
            kv_head_count=key_heads,
            num_hidden_layers=text.num_hidden_layers,
            process_group=self._group,
            seq_length_is_variable=True,
        )

    @property
    def leads(self) -> bool:
        """Whether this rank has the responses of its group's passes."""
        return ranks.rank() == self.first

    def logprobs(
        self,
        policy: Policy,
        input_ids: Tensor,
        sources: Tensor,
        targets: Tensor,
        *,
        packing: Packing,
        host_sources: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns the policy's values for the first rank's row, on every rank of the group. [n] each

        Args:
            policy: takes the same arguments for a piece of the row, see `rpg.learner.policy.Policy`.
            input_ids: a packed row [1, L]. Only the group's first rank's values of this and the next arguments count.
            host_sources: copy of the sources on the host, so that nothing here waits for the device. [n]

        Only the first rank's result propagates a gradient. The weights of every rank get their part of it; summed over
        the ranks it is the whole gradient.
        """
        # Each source is in the part of one rank.
        owners = host_sources // _part_length(input_ids, self.size)
        counts = tuple(torch.bincount(owners, minlength=self.size).tolist())
        row = self._from_first(_Row(input_ids, sources, targets, packing.families, counts))
        place = ranks.rank() - self.first
        part = _PackedPart(row, part=place, parts=self.size, attention=self._attention)
        is_mine = (row.sources >= part.start) & (row.sources < part.end)
        mine = torch.nonzero_static(is_mine, size=row.counts[place])[:, 0]
        logprobs, entropies = policy(part.input_ids, row.sources[mine] - part.start, row.targets[mine], packing=part)
        packing.layers += part.layers
        collect: Callable[..., Tensor] = _Collected.apply
        places = (mine, len(row.targets), self._group, self.first)
        return collect(logprobs, *places), collect(entropies, *places)

    def _from_first(self, row: "_Row") -> "_Row":
        """Returns the first rank's row on all ranks of the group. Tensors stay on their device."""
        sizes = row.input_ids.shape[1], row.families, row.counts
        length, families, counts = ranks.from_rank(self.first, sizes, self._group)
        count = sum(counts)
        if self.leads:
            numbers = torch.cat([row.input_ids[0], row.sources, row.targets])
        else:
            numbers = row.input_ids.new_empty(length + 2 * count)
        dist.broadcast(numbers, src=self.first, group=self._group)
        input_ids, sources, targets = torch.split(numbers, [length, count, count])
        return _Row(input_ids[None], sources, targets, families, counts)


def check_heads(size: int, *, heads: int, key_heads: int) -> None:
    """Raises SpecError if a model's attention heads cannot be divided among `size` ranks."""
    if heads % size or (key_heads % size and size % key_heads):
        fitting = [str(n) for n in range(2, heads + 1) if not heads % n and (not key_heads % n or not n % key_heads)]
        raise SpecError(
            Issue(
                "the model's attention heads do not divide evenly among the ranks",
                path=("training", "sequence_parallel_size"),
                given=f"{size} for {heads} heads of queries and {key_heads} of keys",
                allowed=", ".join(["1", *fitting]),
            )
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """A packed row and the tokens whose logprobs are requested; see `Policy.forward`."""

    input_ids: Tensor
    sources: Tensor
    targets: Tensor
    families: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    """Number of sources in each rank's part."""


def _part_length(input_ids: Tensor, parts: int) -> int:
    """Returns the number of tokens in each part of a row [1, L]. The last part may be padded."""
    return -(-input_ids.shape[1] // parts)


class _PackedPart(Packing):
    """A rank's part of a packed row. All parts have the same length, because an unused sequence pads the last one."""

    def __init__(self, row: _Row, *, part: int, parts: int, attention: Callable[..., Any]) -> None:
        missing = -row.input_ids.shape[1] % parts
        super().__init__((*row.families, *([(missing,)] if missing else [])), row.input_ids.device)
        self._attention = attention
        filled = torch.cat([row.input_ids, row.input_ids.new_zeros(1, missing)], dim=1)
        length = _part_length(row.input_ids, parts)
        self.start, self.end = part * length, (part + 1) * length
        self.input_ids = filled[:, self.start : self.end]
        """Token ids of this part. [1, L / parts]"""

    @cached_property
    def position_ids(self) -> Tensor:
        """Returns the positions of this part's tokens. [1, L / parts]"""
        return self.places[:, self.start : self.end].contiguous()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None
    ) -> Tensor:
        """Returns attention of this part's tokens, with all heads. [1, heads, L / parts, dim] -> [1, L / parts, heads,
        dim]"""
        given = {"packing": self, "scaling": scaling, "sliding_window": sliding_window}
        # DeepSpeed stores a rank's number of heads in the first argument; it is valid only within the exchange.
        joined, _ = self._attention(self._attention, query, key, value, None, position_ids=self.position_ids, **given)
        result: Tensor = joined.view(1, query.shape[2], query.shape[1], -1)
        return result


def _attend_with_some_heads(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: None, *, packing: Packing, **settings: Any
) -> tuple[Tensor, None]:
    """Returns attention over the whole row, for use within the exchange. [1, heads / parts, L, dim] -> [1, L, heads /
    parts, dim]"""
    return Packing.attend(packing, query, key, value, settings["scaling"], settings["sliding_window"]), None


class _Collected(torch.autograd.Function):
    """Autograd function that collects the values of a group's ranks on all of them, and returns the first rank's
    gradient to each."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, group: Any, first: int) -> Tensor:
        """Puts the values [m] at `places` [m] of the result [count]. Each place belongs to one rank."""
        ctx.save_for_backward(places)
        ctx.group, ctx.first = group, first
        result = values.new_zeros(count).index_copy(0, places, values)
        dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        dist.broadcast(gradient, src=ctx.first, group=ctx.group)
        return gradient[places], None, None, None, None
