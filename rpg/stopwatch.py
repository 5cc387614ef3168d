"""Where the seconds of a step go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rpg.batch import StepRollouts

PHASES = ("rollout", "reward", "logprobs", "update", "sync", "checkpoint")


class Stopwatch:
    """Times the phases of one step on this rank, the work of a GPU included.

    A step's time begins where the last one's was read, so that writing its records counts, and the steps add up to all.
    """

    def __init__(self, device: torch.device, last: "Stopwatch | None" = None) -> None:
        self._device = device
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._start: float = last.end if last else self._now()
        self.end: float = self._start

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to a phase."""
        start = self._now()
        yield
        self._seconds[phase] += self._now() - start

    def figures(self, rollouts: StepRollouts, *, epochs: int) -> dict[str, float]:
        """Seconds by phase and of the step so far; response tokens sampled, and all tokens trained on, per second."""
        self.end = self._now()
        trained = int(rollouts.sequence_lengths.sum()) * epochs
        return {
            **{f"time/{phase}": seconds for phase, seconds in self._seconds.items()},
            "time/step": self.end - self._start,
            "tokens_per_second/rollout": len(rollouts.token_ids) / max(self._seconds["rollout"], 1e-9),
            "tokens_per_second/train": trained / max(self._seconds["update"], 1e-9),
        }

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
