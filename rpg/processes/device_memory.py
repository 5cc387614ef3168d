"""Measures this process's peak GPU memory. Tensors whose memory a sleeping engine has released do not count.

torch counts such tensors as allocated: vLLM's allocator unmaps their memory, but the tensors remain. The memory in use
is torch's count minus these, so the peak is measured separately between the moments at which they change.
"""

from collections.abc import Callable
from functools import cache

import torch


class PeakMemory:
    """A tracker of the largest amount of memory in use at once, in bytes."""

    def __init__(self, highest_allocated: Callable[[], int], forget: Callable[[], None]) -> None:
        """
        Args:
            highest_allocated: returns torch's highest count since the last `forget`.
            forget: resets torch's highest count to the current one.
        """
        self._highest_allocated, self._forget = highest_allocated, forget
        self._unmapped = self._highest = 0

    def unmapped(self, num_bytes: int) -> None:
        """Sets the number of allocated bytes that are not mapped to memory. Call it after each change."""
        if num_bytes != self._unmapped:
            self._highest = self.highest()
            self._forget()
            self._unmapped = num_bytes

    def highest(self) -> int:
        """Returns the peak so far."""
        return max(self._highest, self._highest_allocated() - self._unmapped)


@cache
def peak_of_gpu() -> PeakMemory:
    """Returns the tracker of this process's GPU."""
    return PeakMemory(torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats)
