"""Keeps scorers in processes of their own, so that one that hangs or dies costs its sample and nothing else."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, Self

from rpg.data import metadata
from rpg.rewards.score import Score
from rpg.types import Problem

_START_SECONDS = 120.0
"""A worker imports its library (seconds, on a busy machine more) before it says that it is ready."""
_GRACE_SECONDS = 1.0
"""A worker reports a time-out itself; one that has not by this much later is killed."""
_STARTS = 3
"""Failed starts of a worker in a row before the scorer itself is held to be broken."""

_Task = tuple[int, str]
"""Position in the batch, and the request as a line of JSON."""


class WorkerPool:
    """A Scorer whose function runs in worker processes, one response at a time each. They start when needed and stay.

    Use it from the main thread: the workers die with the thread that started them.
    """

    def __init__(self, scorer: str, *, timeout_seconds: float, workers: int = 1) -> None:
        """
        Args:
            scorer: `module:function`, the function taking a Problem and a response and returning a Score.
            timeout_seconds: on one response.
            workers: processes at most.
        """
        self._scorer = scorer
        self._timeout_seconds = timeout_seconds
        self._size = workers
        self._workers: list[_Worker] = []

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score]:
        """See Scorer. RuntimeError where the worker itself cannot start."""
        pairs = zip(problems, responses, strict=True)
        todo: deque[_Task] = deque((index, _request(*pair)) for index, pair in enumerate(pairs))
        scores: dict[int, Score] = {}
        while len(self._workers) < min(self._size, len(todo)):
            self._workers.append(_Worker(self._scorer, self._timeout_seconds))
        while len(scores) < len(responses):
            for worker in self._workers:
                worker.take(todo)
            busy = [worker for worker in self._workers if worker.busy]
            patience = min(worker.deadline for worker in busy) - time.monotonic()
            ready, _, _ = select.select(busy, [], [], max(0.0, patience))
            for worker in busy:
                scores.update(worker.answer(readable=worker in ready))
        return [scores[index] for index in range(len(responses))]

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """One process: starting, idle, or at one response."""

    def __init__(self, scorer: str, timeout_seconds: float) -> None:
        self._scorer = scorer
        self._timeout_seconds = timeout_seconds
        self._task: _Task | None = None
        self._failed_starts = 0
        self._start()

    @property
    def busy(self) -> bool:
        """It owes an answer."""
        return self._task is not None or not self._ready

    def fileno(self) -> int:
        """For select."""
        return self._output.fileno()

    def take(self, todo: deque[_Task]) -> None:
        """Begins the next task, if it is free for one."""
        if self.busy or not todo:
            return
        if (
            self._process.poll() is not None
        ):  # killed while idle, by the system's memory killer perhaps: no sample's fault
            self.end()
            self._start()
            return
        self._task = todo.popleft()
        self.deadline = time.monotonic() + self._timeout_seconds + _GRACE_SECONDS
        with suppress(BrokenPipeError):  # it has just died: its output ends too, and `answer` sees that
            self._input.write(self._task[1].encode())
            self._input.flush()

    def answer(self, *, readable: bool) -> dict[int, Score]:
        """The verdict on the task under way, once there is one: the worker's, or that it took too long or died."""
        if readable:
            part = os.read(self.fileno(), 1 << 16)
            self._received += part
            if part and not self._received.endswith(b"\n"):
                return {}
            return self._finish(self._verdict() if part else self._died())
        if time.monotonic() < self.deadline:
            return {}
        return self._finish(self._died(f"no verdict after {self._timeout_seconds:g} s; the scorer was killed"))

    def end(self) -> None:
        """Kills it; it holds nothing worth saving."""
        self._process.kill()
        self._process.wait()
        self._output.close()
        self._noise.close()
        with suppress(BrokenPipeError):
            self._input.close()

    def _start(self) -> None:
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._received = b""
        self._ready = False
        self.deadline = time.monotonic() + _START_SECONDS
        # A session of its own: the SIGTERM that asks a run to finish its step goes to the whole process group.
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", "rpg.rewards.worker", self._scorer, str(self._timeout_seconds), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._noise,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self._output: IO[bytes] = self._process.stdout

    def _verdict(self) -> Score | None:
        """What the worker said; None for its greeting."""
        fields: dict[str, Any] = json.loads(self._received)
        self._received = b""
        self._ready = True
        self._failed_starts = 0
        return Score(**fields) if fields else None

    def _died(self, reason: str = "") -> Score:
        """Replaces the process, and says what became of the task."""
        self._process.kill()
        code = self._process.wait()
        self._noise.seek(0)
        said = self._noise.read().decode(errors="replace").strip()
        self.end()
        how = signal.Signals(-code).name if code < 0 else f"exit {code}"
        if self._task is None:
            self._failed_starts += 1
            if self._failed_starts == _STARTS:
                raise RuntimeError(f"the worker of scorer {self._scorer} did not start ({how})\n{said[-2000:]}")
        self._start()
        if reason:
            return Score.failed(reason)
        return Score.failed(f"the scorer's process died ({how}) {said.splitlines()[-1] if said else ''}".strip())

    def _finish(self, verdict: Score | None) -> dict[int, Score]:
        if verdict is None or self._task is None:
            return {}
        index, self._task = self._task[0], None
        return {index: verdict}


def _request(problem: Problem, response: str) -> str:
    fields = {
        "problem_id": problem.problem_id,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "dataset": problem.dataset,
        "metadata": metadata.dump(problem.metadata),
    }
    return json.dumps({"problem": fields, "response": response}) + "\n"
