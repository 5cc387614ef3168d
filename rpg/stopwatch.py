"""Where the seconds of a step go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rpg.batches.batch import StepRollouts

PHASES = ("rollout", "reward", "logprobs", "update", "sync", "checkpoint")


class Stopwatch:
    """Times the phases of one step on this rank, the work of a GPU included.

    A step's time begins where the last one's was read, so that writing its records counts, and the steps add up to all.
    """

    def __init__(self, device: torch.device, last: "Stopwatch | None" = None) -> None:
        self._device = device
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._sampling: float | None = None
        self._within = 0.0
        self._start: float = last.end if last else self._now()
        self.end: float = self._start

    @contextmanager
    def __call__(self, phase: str, *, on_host: bool = False) -> Iterator[None]:
        """Adds the time of the block to a phase, less that of phases within it.

        Args:
            on_host: nothing in the block runs on the GPU, whose work of before is not waited for.
        """
        now = time.perf_counter if on_host else self._now
        start, outer, self._within = now(), self._within, 0.0
        yield
        taken = now() - start
        self._seconds[phase] += taken - self._within
        self._within = outer + taken

    def seconds(self, phase: str) -> float:
        """A phase's time so far."""
        return self._seconds[phase]

    def sampling_took(self, seconds: float) -> None:
        """The step's rollouts were sampled beside other work, in this time; `rollout` is what was waited for them."""
        self._sampling = seconds

    def metrics(self, rollouts: StepRollouts, *, trained: int) -> dict[str, float]:
        """Seconds by phase and of the step so far; response tokens sampled, and all tokens trained on, per second."""
        self.end = self._now()
        sampling = self._seconds["rollout"] if self._sampling is None else self._sampling
        return {
            **{f"time/{phase}": seconds for phase, seconds in self._seconds.items()},
            "time/step": self.end - self._start,
            "tokens_per_second/rollout": len(rollouts.token_ids) / max(sampling, 1e-9),
            "tokens_per_second/train": trained / max(self._seconds["update"], 1e-9),
        }

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
