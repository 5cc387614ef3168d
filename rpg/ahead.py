"""Sampling in a thread of its own, batches ahead of the one that is trained on."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from rpg.stopwatch import Stopwatch
from rpg.waiting import Waiting

MakeBatch = Callable[[int, Stopwatch], Waiting]
"""(step, clock) -> the batch of the step. Its collective calls need a group of their own: the main thread may be in the
middle of one."""


class Ahead:
    """A queue of batches, made one after another in the order of their steps."""

    def __init__(self, make: MakeBatch, device: torch.device) -> None:
        self._make = make
        self._device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampling")
        self._batches: dict[int, Future[Waiting]] = {}

    def begin(self, last: int, *, after: int) -> None:
        """Asks for every batch up to step `last` that is neither asked for yet nor of a step up to `after`."""
        first = max(self._batches, default=after) + 1
        for step in range(first, last + 1):
            self._batches[step] = self._thread.submit(self._run, step)

    def rest(self) -> None:
        """Returns once nothing is under way, however it ended."""
        wait(self._batches.values())

    def failure(self) -> BaseException | None:
        """What went wrong with the first batch that could not be made, of those that have ended."""
        ended = (batch for _, batch in sorted(self._batches.items()) if batch.done())
        return next((error for batch in ended if (error := batch.exception())), None)

    def take(self, step: int) -> Waiting:
        """The batch of a step, once it is there. Raises what went wrong with it."""
        return self._batches.pop(step).result()

    def waiting(self, last: int) -> list[Waiting]:
        """The batches up to step `last` that are not taken yet, once they are there."""
        return [batch.result() for step, batch in sorted(self._batches.items()) if step <= last]

    def start_over(self, batches: Iterable[Waiting]) -> None:
        """Forgets all that was asked for, once nothing is under way; these stand for the batches of their steps."""
        for asked in self._batches.values():
            asked.cancel()
        self.rest()
        self._batches.clear()
        for batch in batches:
            self._batches[batch.step] = Future()
            self._batches[batch.step].set_result(batch)

    def close(self) -> None:
        """Ends the thread after the batch under way."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, step: int) -> Waiting:
        clock = Stopwatch(torch.device("cpu"))  # it never waits for the GPU, which the learner shares
        if self._device.type != "cuda":
            return self._make(step, clock)
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.default_stream(self._device))  # on which the weights were loaded
        with torch.cuda.stream(stream):
            return self._make(step, clock)
