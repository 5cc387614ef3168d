"""Reads and writes, as named pieces, the trained weights and optimizer state that a rank holds under each ZeRO stage.

The weights are the float32 ones that the optimizer steps; those of forward and backward passes are derived from them.
All state is saved under the optimizer's own names: tensors of a parameter's shape in pieces, single numbers with each
parameter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rpg.checkpoints.pieces import Piece, PieceFiles, StateCopy
from rpg.learner.deepspeed_inside import fragment
from rpg.processes import ranks

_STEM = "learner"
_WEIGHT = "weight"
_HOW_COMPUTED = {"fused", "foreach", "capturable", "differentiable", "maximize"}
"""Settings of a parameter group that change how an update is computed but not its result. They are not saved, because
another machine may choose other values."""


@dataclass(frozen=True, slots=True)
class Span:
    """The position of a part of a parameter in a stepped tensor."""

    parameter: str
    start: int
    """Index of the part's first element in the flattened parameter."""
    offset: int
    """Index of the part's first element in the flattened stepped tensor."""
    count: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """A tensor that the optimizer steps: a parameter, or a flat partition of many."""

    values: Tensor
    states: dict[Tensor, dict[str, Any]]
    """The optimizer's state of every tensor that it steps."""
    spans: list[Span]

    @property
    def state(self) -> dict[str, Any]:
        """Returns the optimizer's state of this tensor; empty before its first update. Does not add an entry to the
        optimizer."""
        return self.states.get(self.values, {})

    def pieces(self, key: str, values: Tensor) -> Iterator[Piece]:
        """Yields the pieces of the stepped tensor, or of a state of the same shape."""
        flat = values.detach().view(-1)
        for span in self.spans:
            yield Piece(f"{span.parameter}|{key}", span.start, flat[span.offset : span.offset + span.count])

    def tensors(self) -> dict[str, Tensor]:
        """Returns the states with one value for each weight."""
        return {key: value for key, value in self.state.items() if self._elementwise(value)}

    def numbers(self) -> dict[str, list[float | str]]:
        """Returns the states that have a single value, each as [value, dtype]. dtype is empty if the value is not a
        tensor.

        Raises:
            RuntimeError: a state has neither one value nor one for each weight.
        """
        rest = {key: value for key, value in self.state.items() if not self._elementwise(value)}
        if several := [key for key, value in rest.items() if torch.is_tensor(value) and value.numel() != 1]:
            raise RuntimeError(f"the optimizer's {', '.join(several)} cannot be split for a checkpoint")
        return {
            key: [value.item(), str(value.dtype).removeprefix("torch.")] if torch.is_tensor(value) else [value, ""]
            for key, value in rest.items()
        }

    def _elementwise(self, value: Any) -> bool:
        return torch.is_tensor(value) and value.shape == self.values.shape


def save(engine: Any, model: nn.Module, copy: StateCopy) -> None:
    """Adds this rank's part of weights and state to a copy."""
    tensors = list(_stepped(engine, model))
    numbers = {span.parameter: stepped.numbers() for stepped in tensors for span in stepped.spans}
    if not engine.zero_optimization():
        # Every rank holds all tensors and writes some of them.
        tensors = [stepped for index, stepped in enumerate(tensors) if index % ranks.world_size() == ranks.rank()]
    pieces = [
        piece
        for stepped in tensors
        for key, values in [(_WEIGHT, stepped.values), *stepped.tensors().items()]
        for piece in stepped.pieces(key, values)
    ]
    groups = [
        {
            key: value
            for key, value in group.items()
            if key not in _HOW_COMPUTED and isinstance(value, (int, float, str))
        }
        for group in engine.optimizer.param_groups
    ]
    copy.pieces(_STEM, pieces, {"numbers": numbers, "groups": groups})


def load(engine: Any, model: nn.Module, directory: Path) -> None:
    """Restores what `save` wrote, on any number of ranks and with any stage, into the tensors that this rank steps."""
    files = PieceFiles(directory, _STEM)
    numbers = {name: values for notes in files.notes for name, values in notes["numbers"].items()}
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
                _set_numbers(stepped, numbers[first], fused=fused)
        for group, saved in zip(groups, files.notes[0]["groups"], strict=True):
            group.update(saved)


@torch.no_grad()
def reset(engine: Any, model: nn.Module) -> None:
    """Resets the optimizer's state, in place, to that before the first update.

    The newest iterate `z` of schedule-free AdamW becomes the average, which the stepped tensors hold between steps.
    """
    for stepped in _stepped(engine, model):
        for key, value in stepped.state.items():
            if key == "z":
                value.copy_(stepped.values)
            elif torch.is_tensor(value):
                value.zero_()
            else:
                stepped.state[key] = type(value)(0)


def load_weights(model: nn.Module, directory: Path) -> None:
    """Restores the trained weights that `save` wrote, without an optimizer, into a module that no engine has
    sharded."""
    files = PieceFiles(directory, _STEM)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                whole = torch.empty(parameter.numel(), dtype=torch.float32)
                files.fill(Piece(f"{name}|{_WEIGHT}", 0, whole))
                parameter.copy_(whole.view_as(parameter))


def _fill(stepped: Stepped, files: PieceFiles, keys: set[str]) -> None:
    """Fills the weights and the states of one stepped tensor. An existing state is filled in place."""
    for piece in stepped.pieces(_WEIGHT, stepped.values):
        files.fill(piece)
    if keys:
        state = stepped.states.setdefault(stepped.values, {})
    for key in keys:
        if key not in state:
            state[key] = torch.zeros_like(stepped.values)
        for piece in stepped.pieces(key, state[key]):
            files.fill(piece)


def _set_numbers(stepped: Stepped, numbers: dict[str, list[Any]], *, fused: bool) -> None:
    """Sets the single-value states. torch.optim counts steps in a tensor, which fused kernels need on their device."""
    device = stepped.values.device if fused else "cpu"
    for key, (number, dtype) in numbers.items():
        value = torch.tensor(number, dtype=getattr(torch, dtype), device=device) if dtype else number
        stepped.states.setdefault(stepped.values, {})[key] = value


def _stepped(engine: Any, model: nn.Module) -> Iterator[Stepped]:
    """Returns the tensors that the optimizer of this rank steps."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stage = engine.zero_optimization_stage()
    return {0: _whole, 1: _partitions, 2: _partitions, 3: _shards}[stage](engine.optimizer, names)


def _whole(optimizer: Any, names: dict[int, str]) -> Iterator[Stepped]:
    """Yields the stepped tensors without ZeRO: each parameter is a separate tensor."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            spans = [Span(names[id(parameter)], start=0, offset=0, count=parameter.numel())]
            yield Stepped(parameter, optimizer.state, spans)


def _partitions(optimizer: Any, names: dict[int, str]) -> Iterator[Stepped]:
    """Yields the stepped tensors of ZeRO 1 and 2: the parameters of a group are laid end to end and cut into one
    partition per rank."""
    for flat, parameters in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True):
        spans = [
            Span(names[id(parameter)], *held) for parameter in parameters if (held := fragment(parameter)) is not None
        ]
        yield Stepped(flat, optimizer.optimizer.state, spans)


def _shards(optimizer: Any, names: dict[int, str]) -> Iterator[Stepped]:
    """Yields the stepped tensors of ZeRO 3: the shards of a group are laid end to end. Each parameter is cut into one
    shard per rank; the last shards are padded."""
    for flat, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        spans, offset = [], 0
        for parameter in parameters:
            start, count = shard_of(parameter)
            spans.append(Span(names[id(parameter)], start, offset, count))
            offset += parameter.ds_tensor.ds_numel
        yield Stepped(flat, optimizer.optimizer.state, spans)


def shard_of(parameter: Any) -> tuple[int, int]:
    """Returns this rank's shard of a ZeRO 3 parameter, without padding: first element and number of elements."""
    start = parameter.ds_tensor.ds_numel * ranks.rank()
    return start, max(0, min(parameter.ds_tensor.ds_numel, parameter.ds_numel - start))
