"""Peak memory of this process on its GPU, without tensors whose memory an engine has given back while it sleeps.

torch counts such tensors as allocated: vLLM's allocator takes the memory from under them, and they stay. What is really
in use is what torch counts less these, so the peak is taken between the moments at which they change.
"""

from collections.abc import Callable
from functools import cache

import torch


class PeakMemory:
    """The most that was in use at once, bytes."""

    def __init__(self, highest_allocated: Callable[[], int], forget: Callable[[], None]) -> None:
        """
        Args:
            highest_allocated: the most that torch has counted since it was made to forget.
            forget: makes what torch counts now the most.
        """
        self._highest_allocated, self._forget = highest_allocated, forget
        self._unmapped = self._highest = 0

    def unmapped(self, num_bytes: int) -> None:
        """From now on so many of the allocated bytes have no memory behind them. It is called when that has changed."""
        if num_bytes != self._unmapped:
            self._highest = self.highest()
            self._forget()
            self._unmapped = num_bytes

    def highest(self) -> int:
        """The most so far."""
        return max(self._highest, self._highest_allocated() - self._unmapped)


@cache
def peak_of_gpu() -> PeakMemory:
    """The peak on this process's GPU."""
    return PeakMemory(torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats)
