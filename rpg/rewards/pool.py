"""Keeps scorers in their own processes, so that one that hangs or dies affects only its sample."""

import dataclasses
import heapq
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from rpg.data import metadata
from rpg.rewards.score import LONGEST_VERDICT, Member, Score, Scorer, checked, received
from rpg.rewards.sealing import code_of, is_sealed, runs_code
from rpg.sandbox import Confined, Limits, start
from rpg.types import Problem
from specs.machine.standstill import show_work
from specs.schema.reward import Reward

_START_SECONDS = 120.0
"""Longest time in seconds that a worker may take to start. It imports its library, which takes seconds, and more on a
busy machine."""
_GRACE_SECONDS = 1.0
"""Seconds after the time limit at which a worker is killed. Workers normally report time-outs themselves before."""
_DEATH_SECONDS = 2.0
"""Seconds to wait for an exit code: the output of a dying process ends a moment before its exit code is known."""
_RUNNING_CODE = Limits(processes=0)
"""Limits of a worker that starts a process for each response. That process may not start others."""
_UNSEALED = Limits(processes=0, file_bytes=1 << 30, open_files=4096)
"""Limits of scorers that run no text of a response. They may start processes and keep files."""
_MOST_NOISE = 1 << 14
"""Number of bytes at the end of standard error that are searched for the cause of death."""
_STARTS = 3
"""Number of consecutive failed starts of a worker after which the scorer itself counts as broken."""

_PAUSES = (0.5, 2.0, 8.0, 30.0)
"""Seconds before each retry for a response whose service did not answer."""
_NUMBERS = itertools.count()


@dataclass(order=True, slots=True)
class _Task:
    """One response to score."""

    due: float
    """Earliest time to score it, on the monotonic clock."""
    number: int = field(default_factory=_NUMBERS.__next__, init=False)
    request: str = field(compare=False)
    """The request as a line of JSON."""
    tries: int = field(default=0, compare=False)
    verdict: "Future[Score]" = field(default_factory=Future, compare=False, init=False)
    """Future that receives the verdict."""


class WorkerPool(Scorer):
    """A Scorer whose reward runs in worker processes. Each scores one response at a time. They start on demand and
    stay.

    A thread of the pool starts and serves them, since they die with the thread that started them.
    """

    def __init__(self, reward: Reward, *, workers: int = 1) -> None:
        """Takes the reward and `workers`, the largest number of processes."""
        self._reward = reward
        self._size = workers
        self._workers: list[_Worker] = []
        self._todo: deque[_Task] = deque()
        self._later: list[_Task] = []
        """A heap of the tasks that are retried later."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._woken, self._waking = os.pipe()

    def submit(self, problem: Problem, response: str, member: Member | None = None) -> "Future[Score]":  # noqa: ARG002
        """See Scorer. Its result raises RuntimeError if the worker itself cannot start."""
        task = _Task(0.0, _request(problem, response))
        with self._lock:
            self._todo.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="scoring", daemon=True)
                self._thread.start()
        os.write(self._waking, b"+")
        return task.verdict

    def close(self) -> None:
        """Ends the thread and the workers. Waiting tasks get no verdict."""
        if self._closing:
            return
        self._closing = True
        os.write(self._waking, b".")
        if self._thread:
            self._thread.join()
        os.close(self._waking)
        os.close(self._woken)

    def _serve(self) -> None:
        """Runs in the thread until the pool closes or a worker cannot start."""
        try:
            while not self._closing:
                self._attend()
        except Exception as error:
            self._give_up(error)
        finally:
            for worker in self._workers:
                worker.end()
            self._workers = []

    def _attend(self) -> None:
        """Hands out tasks, waits for an answer, a deadline or another task, and passes on the verdicts."""
        while self._later and self._later[0].due <= time.monotonic():
            self._todo.append(heapq.heappop(self._later))
        wanted = len(self._todo) + sum(worker.busy for worker in self._workers)
        while len(self._workers) < min(self._size, wanted):
            self._workers.append(_Worker(self._reward, self._later))
        for worker in self._workers:
            worker.take(self._todo)
        busy = [worker for worker in self._workers if worker.busy]
        times = [*(worker.deadline for worker in busy), *(task.due for task in self._later[:1])]
        patience = max(0.0, min(times) - time.monotonic()) if times else None
        sources: list[int | _Worker] = [self._woken, *busy]
        ready, writable, _ = select.select(sources, [worker.input for worker in busy if worker.unsent], [], patience)
        if self._woken in ready:
            os.read(self._woken, 1 << 16)
        for worker in busy:
            if worker.input in writable:
                worker.send()
            worker.answer(readable=worker in ready)

    def _give_up(self, error: Exception) -> None:
        """Fails all waiting tasks with the error. The next task starts new workers."""
        with self._lock:
            waiting = [*self._todo, *self._later, *(worker.task for worker in self._workers if worker.task)]
            self._todo.clear()
            self._later.clear()
            self._thread = None
        for task in waiting:
            task.verdict.set_exception(error)


class _Worker:
    """One worker process, which is starting, idle, or scoring a response."""

    def __init__(self, reward: Reward, later: list[_Task]) -> None:
        """Starts the process. `later` is the heap for tasks to retry."""
        self._reward = reward
        self._later = later
        self._timeout_seconds = reward.timeout_seconds
        self.task: _Task | None = None
        self._failed_starts = 0
        self._start()

    @property
    def busy(self) -> bool:
        """Returns whether the worker is starting or has a task."""
        return self.task is not None or not self._ready

    def fileno(self) -> int:
        """Returns the descriptor for select."""
        return self._process.stdout.fileno()

    def take(self, todo: deque[_Task]) -> None:
        """Begins the next task if the worker is free."""
        if self.busy or not todo:
            return
        # Killed while idle, perhaps by the kernel's out-of-memory killer, or it printed unexpectedly: no sample's
        # fault.
        if select.select([self], [], [], 0)[0]:
            self.end()
            self._start()
            return
        self.task = todo.popleft()
        self.deadline = time.monotonic() + self._timeout_seconds + _GRACE_SECONDS
        self.unsent = memoryview(self.task.request.encode())
        self.send()

    def send(self) -> None:
        """Writes as much of the request as the process accepts, so that a process that does not read cannot block
        others."""
        try:
            self.unsent = self.unsent[os.write(self.input, self.unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it has just died: its output ends too, and `answer` handles that
            self.unsent = memoryview(b"")

    def answer(self, *, readable: bool) -> None:
        """Passes on the verdict on the task once it exists: the worker's, or an error if the worker was late or
        died."""
        if readable:
            part = os.read(self.fileno(), 1 << 16)
            self._received += part
            if not part:
                self._finish(self._died())
            elif len(self._received) > LONGEST_VERDICT:
                self._finish(self._died("the scorer wrote without end"))
            elif part.endswith(b"\n"):
                self._finish(self._verdict())
        if self.busy and time.monotonic() >= self.deadline:
            self._finish(self._died(f"no verdict after {self._timeout_seconds:g} s; the scorer was killed"))

    def end(self) -> None:
        """Kills the process, which has no state to save."""
        self._process.end()
        self._noise.close()

    def _start(self) -> None:
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._received = bytearray()
        self.unsent = memoryview(self._job())
        self._ready = False
        self.deadline = time.monotonic() + _START_SECONDS
        sealed = is_sealed(self._reward)
        # In a new session: the SIGTERM that asks a run to finish its step goes to the whole process group.
        self._process: Confined = start(
            [sys.executable, "-P", "-m", "rpg.rewards.worker"],
            sealed=sealed,
            limits=self._limits(sealed),
            readable=code_of(self._reward),
            variables=[name for part in self._reward.parts() for name in part.environment],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._noise,
        )
        self.input = self._process.stdin.fileno()
        os.set_blocking(self.input, False)

    def _limits(self, sealed: bool) -> Limits | None:
        if not sealed:
            return _UNSEALED
        return _RUNNING_CODE if runs_code(self._reward) else None

    def _job(self) -> bytes:
        """Returns the worker's first line of input, JSON; see `worker.main`. A command-line argument would have a size
        limit."""
        variant = type(self._reward)
        job = [f"{variant.__module__}:{variant.__qualname__}", self._reward.model_dump_json(), runs_code(self._reward)]
        return json.dumps(job).encode() + b"\n"

    def _verdict(self) -> Score | None:
        """Returns the verdict that the worker sent; None for the line that reports that it is ready.

        A worker may run a text of a response, which may write anything: the line is read as JSON and checked.
        """
        line, self._received = self._received, bytearray()
        if not self._ready:
            self._ready = True
            self._failed_starts = 0
            return None
        try:
            return received(line, ran_text=runs_code(self._reward))
        except ValueError:
            return self._died("the scorer's output is not a verdict")

    def _died(self, reason: str = "") -> Score:
        """Replaces the process. Returns the task's verdict, whose error is `reason` or how the process ended."""
        ending = self._process.ending(0 if reason else _DEATH_SECONDS)
        self._noise.seek(-min(_MOST_NOISE, self._noise.seek(0, os.SEEK_END)), os.SEEK_END)
        stderr = self._noise.read().decode(errors="replace").strip()
        self.end()
        if self.task is None:
            self._failed_starts += 1
            if self._failed_starts == _STARTS:
                raise RuntimeError(
                    f"the worker of reward {self._reward.type} did not start ({ending})\n{stderr[-2000:]}"
                )
        self._start()
        if reason:
            return Score.failed(reason)
        return Score.failed(f"the scorer's process died ({ending}) {stderr.splitlines()[-1] if stderr else ''}".strip())

    def _finish(self, verdict: Score | None) -> None:
        if verdict is not None and self.task is not None:
            show_work()
            if verdict.away and self.task.tries < len(_PAUSES):
                self.task.due = time.monotonic() + _PAUSES[self.task.tries]
                self.task.tries += 1
                heapq.heappush(self._later, self.task)
            else:
                self.task.verdict.set_result(checked(self._reward, verdict))
            self.task = None


def _request(problem: Problem, response: str) -> str:
    fields = {each.name: getattr(problem, each.name) for each in dataclasses.fields(problem)}
    fields["metadata"] = metadata.dump(problem.metadata)
    return json.dumps({"problem": fields, "response": response}) + "\n"
