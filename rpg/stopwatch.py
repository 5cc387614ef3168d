"""Measures how long each phase of a step takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rpg.batches.batch import StepRollouts

PHASES = ("rollout", "reward", "logprobs", "update", "sync", "checkpoint")
"""Phases of every step. A phase of only some steps, such as `evaluate`, has a metric only in those steps."""


class Stopwatch:
    """A timer of the phases of one step on this rank, including work on the GPU.

    A step begins when the metrics of the step before are computed. So the time to write those metrics counts, and the
    times of all steps add up to the time of the run.
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
        """Adds the block's time to a phase, minus the time of phases measured inside the block.

        Args:
            on_host: whether the block starts nothing on the GPU; GPU work from before the block is then not waited for.
        """
        now = time.perf_counter if on_host else self._now
        start, outer, self._within = now(), self._within, 0.0
        yield
        taken = now() - start
        self._seconds[phase] = self._seconds.get(phase, 0.0) + taken - self._within
        self._within = outer + taken

    def seconds(self, phase: str) -> float:
        """Returns the seconds of a phase so far."""
        return self._seconds[phase]

    def sampling_took(self, seconds: float) -> None:
        """Records how long sampling took while training ran. The phase `rollout` then measures only how long training
        waited for it.

        0 means unknown, for example for a batch from a checkpoint.
        """
        self._sampling = seconds

    def metrics(self, rollouts: StepRollouts, *, num_trained: int) -> dict[str, float]:
        """Returns the step's metrics time/* and tokens_per_second/*. `num_trained`: number of tokens in all passes,
        including context."""
        self.end = self._now()
        sampling = self._seconds["rollout"] if self._sampling is None else self._sampling
        return {
            **{f"time/{phase}": seconds for phase, seconds in self._seconds.items()},
            "time/step": self.end - self._start,
            "tokens_per_second/rollout": int(rollouts.num_sampled.sum()) / sampling if sampling else 0.0,
            "tokens_per_second/train": num_trained / max(self._seconds["update"], 1e-9),
        }

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
