"""Moves state that only updates need to host memory between updates. The sampler then has more GPU memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_MOVED_BY_DEEPSPEED: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("hp_params", "optim_states"),
    2: ("hp_params", "optim_states"),
    3: ("lp_grads", "contiguous_grad_buffer"),
}
"""ZeRO stage -> state that DeepSpeed itself moves, by names of its OffloadStateTypeEnum. At 1 and 2 no gradients remain
after an update. At 3 DeepSpeed moves float32 weights and optimizer state only for its own FusedAdam, and without ZeRO
it moves nothing. In these cases this module moves them."""


class UpdateState:
    """A rank's optimizer state, float32 weights other than the model's own, and gradient buffers.

    The model's own weights stay in place: they are used for sampling, weight transfer to engines, and logprobs.
    """

    def __init__(self, engine: Any, device: torch.device) -> None:
        """
        Args:
            engine: DeepSpeed's engine, after its initialisation.
            device: device of the updates.
        """
        self._engine = engine
        self._device = device

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Allows updates within the block. Saving and loading work inside and outside."""
        self.to_device()
        try:
            yield
        finally:
            self.to_host()

    def to_host(self) -> None:
        """Moves everything to host memory, page-locked on a machine with a GPU. Tensors that are there already stay."""
        if moved := _MOVED_BY_DEEPSPEED[self._engine.zero_optimization_stage()]:
            self._engine.offload_states(include=moved)
        on_gpu = self._device.type == "cuda"
        tensors = [tensor for tensor in self._tensors() if tensor.device.type == self._device.type]
        copies = [torch.empty_like(tensor, device="cpu", pin_memory=on_gpu) for tensor in tensors]
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._wait_for_copies()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.data = copy

    def to_device(self) -> None:
        """Moves everything back to the device."""
        if _MOVED_BY_DEEPSPEED[self._engine.zero_optimization_stage()]:
            self._engine.reload_states()
        for tensor in self._tensors():
            tensor.data = tensor.data.to(self._device, non_blocking=True)
        self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _tensors(self) -> Iterator[Tensor]:
        """Yields the tensors that DeepSpeed does not move."""
        stage = self._engine.zero_optimization_stage()
        if stage in (1, 2):
            return
        for state in self._engine.basic_optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))
        if stage == 3:
            zero = self._engine.optimizer
            shards = {id(flat) for flat in zero.fp16_partitioned_groups_flat}
            # In float32 the optimizer steps the model's own weights.
            yield from (flat for flat in zero.fp32_partitioned_groups_flat if id(flat) not in shards)
