"""Sampling in a separate thread, a few batches ahead of training."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpg.batches.batch import StepRollouts
from rpg.batches.shares import holding
from rpg.checkpoints.pieces import count_values, load_values
from rpg.processes import ranks
from rpg.rewards.score import Score
from rpg.stopwatch import Stopwatch
from rpg.types import RecordedTurn, TurnCounts

WAITING = "rollouts"
"""Stem of the checkpoint file with the batches that are sampled but not yet trained on."""


@dataclass(frozen=True, slots=True)
class QueuedBatch:
    """The batch of a later step."""

    step: int
    rollouts: StepRollouts
    position: int
    """Number of problems used since the run began, including those of this batch."""
    sampling_seconds: float = 0.0
    """Seconds that this rank took to sample it."""
    seen: torch.Tensor | None = None
    """Lengths seen up to this batch (`SeenLengths.state`); None without any. A checkpoint has only those of its last
    batch."""
    order: torch.Tensor | None = None
    """State of the prompts' order after this batch (`PromptOrder.state`). A checkpoint has only that of its last
    batch."""
    opened: dict[str, Any] | None = None
    """This rank's open groups after this batch (`OpenGroups.state`); None without `partial`. A checkpoint has only
    those of its last batch."""


MakeBatch = Callable[[int, Stopwatch], QueuedBatch]
"""Function (step, clock) -> batch of the step. Its collective calls need their own process group, because the main
thread may be in the middle of a collective call."""


class SamplingQueue:
    """A queue of batches, made one after another in the order of their steps."""

    def __init__(self, make: MakeBatch, device: torch.device) -> None:
        self._make = make
        self._device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampling")
        self._batches: dict[int, Future[QueuedBatch]] = {}

    def begin(self, last: int, *, after: int) -> None:
        """Requests the batches of the steps from `after` + 1 to `last` that were not requested yet."""
        first = max(self._batches, default=after) + 1
        for step in range(first, last + 1):
            self._batches[step] = self._thread.submit(self._run, step)

    def wait(self) -> None:
        """Waits until no batch is being made, whether it succeeded or failed."""
        wait(self._batches.values())

    def failure(self) -> BaseException | None:
        """Returns the error of the first batch that failed; None if none has."""
        ended = (batch for _, batch in sorted(self._batches.items()) if batch.done())
        return next((error for batch in ended if (error := batch.exception())), None)

    def take(self, step: int) -> QueuedBatch:
        """Waits for the batch of a step and returns it. Raises its error if it failed."""
        return self._batches.pop(step).result()

    def waiting(self, last: int) -> list[QueuedBatch]:
        """Waits for the batches up to step `last` that have not been fetched yet, and returns them."""
        return [batch.result() for step, batch in sorted(self._batches.items()) if step <= last]

    def start_over(self, batches: Iterable[QueuedBatch]) -> None:
        """Waits for the batch in progress, drops all batches, and queues these batches instead."""
        for pending in self._batches.values():
            pending.cancel()
        self.wait()
        self._batches.clear()
        for batch in batches:
            self._batches[batch.step] = Future()
            self._batches[batch.step].set_result(batch)

    def close(self) -> None:
        """Ends the thread after the batch in progress."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, step: int) -> QueuedBatch:
        clock = Stopwatch(torch.device("cpu"))  # it never waits for the GPU, which the learner shares
        if self._device.type != "cuda":
            return self._make(step, clock)
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.default_stream(self._device))  # the stream on which the weights were loaded
        with torch.cuda.stream(stream):
            return self._make(step, clock)


def plain_waiting(batches: Sequence[QueuedBatch]) -> list[dict[str, Any]]:
    """Returns batches as tensors and plain values, for a checkpoint."""
    return [{"step": batch.step, "position": batch.position, "rollouts": _plain(batch.rollouts)} for batch in batches]


def load_waiting(
    directory: Path,
    *,
    seen: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    opened: dict[str, Any] | None = None,
) -> list[QueuedBatch]:
    """Returns the batches in a checkpoint. If a different number of ranks saved it, each saved share goes to one of the
    present ranks."""
    saved = count_values(directory, WAITING)
    if not saved:
        return []
    mine = [load_values(directory, WAITING, rank=rank) for rank in range(ranks.rank(), saved, ranks.world_size())]
    known = mine[0] if mine else load_values(directory, WAITING, rank=0)  # each file has the values that all ranks know
    return [
        QueuedBatch(
            record["step"],
            holding(_rollouts(record["rollouts"]), [_rollouts(share[number]["rollouts"]) for share in mine]),
            position=record["position"],
            seen=seen,
            order=order,
            opened=opened,
        )
        for number, record in enumerate(known)
    ]


def _plain(rollouts: StepRollouts) -> dict[str, Any]:
    """Returns the fields as tensors and plain values, which torch loads without running code."""
    values = {field.name: getattr(rollouts, field.name) for field in fields(rollouts)}
    return {
        **{name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in values.items()},
        "prompts": [torch.from_numpy(prompt) for prompt in rollouts.prompts],
        "scores": [asdict(score) for score in rollouts.scores],
        "turns": [[asdict(turn) for turn in turns] for turns in rollouts.turns],
        "turn_counts": [asdict(counts) for counts in rollouts.turn_counts],
    }


def _rollouts(plain: dict[str, Any]) -> StepRollouts:
    values: dict[str, Any] = {
        name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in plain.items()
    }
    values["prompts"] = tuple(prompt.numpy() for prompt in plain["prompts"])
    values["scores"] = tuple(Score(**score) for score in plain["scores"])
    values["turns"] = tuple(tuple(RecordedTurn(**turn) for turn in turns) for turns in plain["turns"])
    values["turn_counts"] = tuple(TurnCounts(**counts) for counts in plain["turn_counts"])
    return StepRollouts(**values)
