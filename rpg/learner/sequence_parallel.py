"""Several ranks share each row of a pass, so that a sequence too long for one rank's memory can be trained on.

Sequence parallelism of DeepSpeed-Ulysses, Jacobs 2023, arXiv:2309.14509: a rank computes a piece of the row in all
layers, and in attention the whole row for its share of the heads; the ranks trade pieces for heads before each
attention and back after it. ZeRO goes on over all ranks, and nothing but the learner knows that rows are shared: the
first rank of a group has the responses, the losses and the rows on record, and the others help with its passes.
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
    """This rank and its neighbours, which compute each pass together. All ranks make the same calls."""

    def __init__(self, size: int, config: PretrainedConfig) -> None:
        """Every rank forms its group.

        Args:
            size: ranks in a group, a divisor of their number. Neighbours form one, best on one machine.
            config: of the model, whose heads are shared out.
        Raises:
            SpecError: the ranks do not make up whole groups, or the heads cannot be shared out.
        """
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        if ranks.world_size() % size:
            given = f"{size} of {ranks.world_size()} ranks"
            path = ("training", "sequence_parallel_size")
            raise SpecError(Issue("the ranks that there are do not make up whole groups", path, given))
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
        """The policy's values for the first rank's row, on every rank of the group. [n] each

        Args:
            policy: takes what this takes, of a piece of the row; see `rpg.learner.policy.Policy`.
            input_ids: a packed row [1, L]. This and what follows count on the group's first rank alone.
            host_sources: the sources on the host, so that nothing here waits for the device. [n]

        A gradient flows back from the first rank's result alone, to the weights of every rank, each its part of it:
        summed over the ranks that is the whole.
        """
        # A source is in the part of one rank.
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
        """The first rank's row on all ranks of the group; tensors stay on their device."""
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
    """Raises SpecError where so many ranks cannot share out a model's attention heads."""
    if heads % size or (key_heads % size and size % key_heads):
        fitting = [str(n) for n in range(2, heads + 1) if not heads % n and (not key_heads % n or not n % key_heads)]
        raise SpecError(
            Issue(
                "the model's attention heads cannot be shared out among so many ranks",
                path=("training", "sequence_parallel_size"),
                given=f"{size} for {heads} heads of queries and {key_heads} of keys",
                allowed=", ".join(["1", *fitting]),
            )
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """A packed row, and whose logprobs are wanted of it; see `Policy.forward`."""

    input_ids: Tensor
    sources: Tensor
    targets: Tensor
    families: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    """How many of the sources are in each rank's part."""


def _part_length(input_ids: Tensor, parts: int) -> int:
    """Tokens of each part of a row [1, L]; the last part may be filled up."""
    return -(-input_ids.shape[1] // parts)


class _PackedPart(Packing):
    """A rank's part of a packed row. All are of one length: the last is filled up with a sequence that nobody asks."""

    def __init__(self, row: _Row, *, part: int, parts: int, attention: Callable[..., Any]) -> None:
        missing = -row.input_ids.shape[1] % parts
        super().__init__((*row.families, *([(missing,)] if missing else [])), row.input_ids.device)
        self._attention = attention
        filled = torch.cat([row.input_ids, row.input_ids.new_zeros(1, missing)], dim=1)
        length = _part_length(row.input_ids, parts)
        self.start, self.end = part * length, (part + 1) * length
        self.input_ids = filled[:, self.start : self.end]
        """[1, L / parts]"""

    @cached_property
    def position_ids(self) -> Tensor:
        """Positions of this part's tokens. [1, L / parts]"""
        return self.places[:, self.start : self.end].contiguous()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None
    ) -> Tensor:
        """Attention of this part's tokens, with all heads. [1, heads, L / parts, dim] -> [1, L / parts, heads, dim]"""
        given = {"packing": self, "scaling": scaling, "sliding_window": sliding_window}
        # The first argument is where DeepSpeed notes how many heads a rank has, which holds within the exchange alone.
        joined, _ = self._attention(self._attention, query, key, value, None, position_ids=self.position_ids, **given)
        result: Tensor = joined.view(1, query.shape[2], query.shape[1], -1)
        return result


def _attend_with_some_heads(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: None, *, packing: Packing, **settings: Any
) -> tuple[Tensor, None]:
    """The attention within the exchange, of the whole row. [1, heads / parts, L, dim] -> [1, L, heads / parts, dim]"""
    return Packing.attend(packing, query, key, value, settings["scaling"], settings["sliding_window"]), None


class _Collected(torch.autograd.Function):
    """Values of a group's ranks put together on all of them, and the first rank's gradient given back to them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, group: Any, first: int) -> Tensor:
        """values [m] stand at `places` [m] of the result [count]; each place is one rank's."""
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
