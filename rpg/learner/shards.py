"""What a rank holds of the trained weights and the optimizer's state under each ZeRO stage, as pieces by name.

The weights are the float32 ones that the optimizer steps; those of forward and backward follow from them. State
travels under the optimizer's own names, whatever it keeps: tensors of a parameter's shape in pieces, single numbers
with each parameter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rpg.checkpoints.pieces import Piece, PieceFiles, StateCopy
from rpg.processes import ranks

_STEM = "learner"
_WEIGHT = "weight"
_MANNERS = {"fused", "foreach", "capturable", "differentiable", "maximize"}
"""Of a parameter group: how its update is computed, which another machine may do in another way."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a part of a parameter lies in a stepped tensor."""

    parameter: str
    start: int
    """Its first element in the flattened parameter."""
    offset: int
    """Its first element in the flattened stepped tensor."""
    count: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """A tensor that the optimizer steps: a parameter, or a flat partition of many."""

    values: Tensor
    states: dict[Tensor, dict[str, Any]]
    """The optimizer's, of all that it steps."""
    spans: list[Span]

    @property
    def state(self) -> dict[str, Any]:
        """What the optimizer keeps with it; empty before its first update. Looking makes no entry."""
        return self.states.get(self.values, {})

    def pieces(self, key: str, values: Tensor) -> Iterator[Piece]:
        """The parts of the stepped tensor, or of a state of its shape."""
        flat = values.detach().view(-1)
        for span in self.spans:
            yield Piece(f"{span.parameter}|{key}", span.start, flat[span.offset : span.offset + span.count])

    def tensors(self) -> dict[str, Tensor]:
        """States with a value for each weight."""
        return {key: value for key, value in self.state.items() if self._elementwise(value)}

    def numbers(self) -> dict[str, list[float | str]]:
        """States with one value for all, and what holds it. Raises RuntimeError where a state is neither."""
        rest = {key: value for key, value in self.state.items() if not self._elementwise(value)}
        if odd := [key for key, value in rest.items() if torch.is_tensor(value) and value.numel() != 1]:
            raise RuntimeError(f"the optimizer's {', '.join(odd)} cannot be cut up for a checkpoint")
        return {
            key: [value.item(), str(value.dtype).removeprefix("torch.")] if torch.is_tensor(value) else [value, ""]
            for key, value in rest.items()
        }

    def _elementwise(self, value: Any) -> bool:
        return torch.is_tensor(value) and value.shape == self.values.shape


def save(engine: Any, model: nn.Module, copy: StateCopy) -> None:
    """Gives a copy what this rank has to write."""
    held = list(_stepped(engine, model))
    numbers = {span.parameter: stepped.numbers() for stepped in held for span in stepped.spans}
    if not engine.zero_optimization():
        # Every rank holds all of it, and writes its share.
        held = [stepped for index, stepped in enumerate(held) if index % ranks.world_size() == ranks.rank()]
    pieces = [
        piece
        for stepped in held
        for key, values in [(_WEIGHT, stepped.values), *stepped.tensors().items()]
        for piece in stepped.pieces(key, values)
    ]
    groups = [
        {key: value for key, value in group.items() if key not in _MANNERS and isinstance(value, (int, float, str))}
        for group in engine.optimizer.param_groups
    ]
    copy.pieces(_STEM, pieces, {"numbers": numbers, "groups": groups})


def load(engine: Any, model: nn.Module, directory: Path) -> None:
    """Takes back what `save` of any number of ranks and any stage wrote, for what the optimizer steps."""
    files = PieceFiles(directory, _STEM)
    numbers = {name: found for notes in files.notes for name, found in notes["numbers"].items()}
    keys: dict[str, set[str]] = {}
    for name in files.names():
        parameter, _, key = name.rpartition("|")
        keys.setdefault(parameter, set()).add(key)
    groups = engine.optimizer.param_groups
    fused = any(group.get("fused") or group.get("capturable") for group in groups)
    with torch.no_grad():
        for stepped in _stepped(engine, model):
            if stepped.spans:
                first = stepped.spans[0].parameter
                _fill(stepped, files, keys[first] - {_WEIGHT})
                _count(stepped, numbers[first], fused=fused)
        for group, saved in zip(groups, files.notes[0]["groups"], strict=True):
            group.update(saved)


def _fill(stepped: Stepped, files: PieceFiles, keys: set[str]) -> None:
    """Weights and states of one stepped tensor, in place where there is a state already."""
    for piece in stepped.pieces(_WEIGHT, stepped.values):
        files.fill(piece)
    if keys:
        state = stepped.states.setdefault(stepped.values, {})
    for key in keys:
        if key not in state:
            state[key] = torch.zeros_like(stepped.values)
        for piece in stepped.pieces(key, state[key]):
            files.fill(piece)


def _count(stepped: Stepped, numbers: dict[str, list[Any]], *, fused: bool) -> None:
    """States of one value. torch.optim counts its steps in a tensor, which fused kernels want on their device."""
    device = stepped.values.device if fused else "cpu"
    for key, (number, dtype) in numbers.items():
        value = torch.tensor(number, dtype=getattr(torch, dtype), device=device) if dtype else number
        stepped.states.setdefault(stepped.values, {})[key] = value


def _stepped(engine: Any, model: nn.Module) -> Iterator[Stepped]:
    """What the optimizer of this rank steps."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stage = engine.zero_optimization_stage()
    return {0: _whole, 1: _partitions, 2: _partitions, 3: _shards}[stage](engine.optimizer, names)


def _whole(optimizer: Any, names: dict[int, str]) -> Iterator[Stepped]:
    """Without ZeRO: every parameter by itself."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            spans = [Span(names[id(parameter)], start=0, offset=0, count=parameter.numel())]
            yield Stepped(parameter, optimizer.state, spans)


def _partitions(optimizer: Any, names: dict[int, str]) -> Iterator[Stepped]:
    """ZeRO 1 and 2: a group's parameters end to end, cut into one partition a rank."""
    if hasattr(optimizer, "bf16_groups"):  # DeepSpeed has an optimizer of its own for stage 1 in bfloat16.
        groups = zip(optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, strict=True)
    else:
        groups = zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True)
    for flat, parameters in groups:
        spans = [
            Span(names[id(parameter)], held.lp_fragment_address.start, held.hp_fragment_address.start, numel)
            for parameter in parameters
            if (held := parameter._hp_mapping) is not None and (numel := held.lp_fragment_address.numel)
        ]
        yield Stepped(flat, optimizer.optimizer.state, spans)


def _shards(optimizer: Any, names: dict[int, str]) -> Iterator[Stepped]:
    """ZeRO 3: each parameter cut into one shard a rank, the last ones padded; a group's shards end to end."""
    for flat, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        spans, offset = [], 0
        for parameter in parameters:
            start, count = shard_of(parameter)
            spans.append(Span(names[id(parameter)], start, offset, count))
            offset += parameter.ds_tensor.ds_numel
        yield Stepped(flat, optimizer.optimizer.state, spans)


def shard_of(parameter: Any) -> tuple[int, int]:
    """This rank's shard of a ZeRO 3 parameter, without its padding: first element, and number of elements."""
    start = parameter.ds_tensor.ds_numel * ranks.rank()
    return start, max(0, min(parameter.ds_tensor.ds_numel, parameter.ds_numel - start))
