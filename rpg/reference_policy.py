"""The reference policy's weights: lent to the learner's module for a pass, so that there is no second model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rpg import ranks


class ReferencePolicy:
    """A snapshot of a module's weights. When they are sharded, each rank keeps its own shard."""

    def __init__(self, module: nn.Module) -> None:
        """The snapshot is the module as it is now."""
        self._module = module
        self._weights = {name: tensor.clone() for name, tensor in self._held()}

    def move(self, *, ema_decay: float = 0.0) -> None:
        """Makes the snapshot the present policy, or, with a decay, `decay * snapshot + (1 - decay) * policy`."""
        for name, tensor in self._held():
            self._weights[name].lerp_(tensor, 1 - ema_decay) if ema_decay else self._weights[name].copy_(tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the module holds the snapshot's weights. Nothing is copied; train on nothing inside."""
        mine = {name: tensor.data for name, tensor in self._held()}
        try:
            for name, tensor in self._held():
                tensor.data = self._weights[name]
            with torch.no_grad():
                yield
        finally:
            for name, tensor in self._held():
                tensor.data = mine[name]

    def save(self, directory: Path) -> None:
        """Writes the snapshot: rank 0 the whole, or each rank its shard."""
        if self._sharded or ranks.rank() == 0:
            save_file({name: weight.cpu() for name, weight in self._weights.items()}, directory / self._file)

    def load(self, directory: Path) -> None:
        """Takes back what `save` wrote."""
        for name, weight in load_file(directory / self._file).items():
            self._weights[name].copy_(weight)

    @property
    def _file(self) -> str:
        return f"reference-rank{ranks.rank():05}.safetensors" if self._sharded else "reference.safetensors"

    @property
    def _sharded(self) -> bool:
        return any(hasattr(parameter, "ds_tensor") for parameter in self._module.parameters())

    @torch.no_grad()
    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank holds of each parameter: the whole, or at ZeRO 3 its shard."""
        for name, parameter in self._module.named_parameters():
            yield name, getattr(parameter, "ds_tensor", parameter)
