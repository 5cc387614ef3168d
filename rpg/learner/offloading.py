"""State that only updates need, in host memory between them: a sampler then has that much more of the GPU's memory."""

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
"""State that DeepSpeed moves itself, by ZeRO stage, in the words of its OffloadStateTypeEnum. At 1 and 2 no gradients
are left after an update. At 3 DeepSpeed moves float32 weights and optimizer state of its own FusedAdam alone, and
without ZeRO nothing: there they are moved here."""


class UpdateState:
    """The optimizer's state, the float32 weights beside the model's own, and the room for gradients, of one rank.

    The model's own weights stay where they are: they are sampled from, handed to engines, and give logprobs.
    """

    def __init__(self, engine: Any, device: torch.device) -> None:
        """
        Args:
            engine: DeepSpeed's, after its initialisation.
            device: where updates are made.
        """
        self._engine = engine
        self._device = device

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Updates can be made within the block. Outside, saving and loading work as within."""
        self.to_device()
        try:
            yield
        finally:
            self.to_host()

    def to_host(self) -> None:
        """Moves everything to host memory, page-locked where there is a GPU; what is there already stays."""
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
        """Moves everything back."""
        if _MOVED_BY_DEEPSPEED[self._engine.zero_optimization_stage()]:
            self._engine.reload_states()
        for tensor in self._tensors():
            tensor.data = tensor.data.to(self._device, non_blocking=True)
        self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _tensors(self) -> Iterator[Tensor]:
        """Tensors that DeepSpeed does not move."""
        stage = self._engine.zero_optimization_stage()
        if stage in (1, 2):
            return
        for state in self._engine.basic_optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))
        if stage == 3:
            zero = self._engine.optimizer
            shards = {id(flat) for flat in zero.fp16_partitioned_groups_flat}
            # In float32 the weights that are stepped are the model's own.
            yield from (flat for flat in zero.fp32_partitioned_groups_flat if id(flat) not in shards)
