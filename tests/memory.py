"""What tensors hold."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made within the block held at one time, those of `known` left out."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._live = {tensor.untyped_storage().data_ptr(): 0 for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None):
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self._live:
                self._live[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage.data_ptr(), None)
        self.peak = max(self.peak, sum(self._live.values()))
        return result
