"""Execution of several runs of an experiment at a time, each in the main thread of its own process.

A run needs a main thread to itself: Prefect calls its flow there, signals arrive there, and the kernel ends a stage's
process with the thread that started it. So a worker is a process that executes one run after another. The command
writes run ids to the worker's standard input, and the worker writes events to its standard output as lines of JSON.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from queue import Empty, Queue
from typing import IO, Any

from pipelines.home.home import Home
from pipelines.planning.plan import RunPlan
from pipelines.prefect.flows.experiment import Outcomes, RunOutcome, next_run, outcome_of, wait_for_another
from pipelines.prefect.server.api import client_settings
from pipelines.processes.reap import reap
from pipelines.processes.stop import Stop, StopRequest, is_cancelled
from pipelines.processes.supervisor import StageStoppedError, failure, log_size
from pipelines.running.progress import ProgressReporter, RunsReporter
from pipelines.running.run import RunExecution
from specs.document import Document
from specs.errors import RpgError, SpecError, read_issue
from specs.machine.parent import RUNS_AT_ONCE, die_with_parent

_POLL_SECONDS = 0.2
_END_SECONDS = 30.0
"""Seconds for a worker to end by itself after its last run, or after it was asked to stop."""
_ENDED = "ended"
"""The event that reports how a run ended. The others are named after the methods of ProgressReporter."""


def execute_in_parallel(
    document: Document, runs: Sequence[RunPlan], home: Home, api_url: str, at_once: int, progress: RunsReporter
) -> Outcomes:
    """Executes runs of an experiment, `at_once` at a time. Main thread only.

    The first signal to this process is passed on: the runs under way stop and save their state as each would alone, and
    no other begins, as after a cancel of the experiment. A second signal kills the processes that still run. No worker
    outlives this process, however it ends. If a worker dies, only its run fails; another worker replaces it.
    """
    events: _Events = Queue()
    stop, passed_on, waiting, numbers = Stop(), False, deque(enumerate(runs, start=1)), count(1)
    workers: list[_Worker] = []

    def begin() -> None:
        """Gives the next run to an idle worker."""
        worker = next((worker for worker in workers if worker.idle), None)
        if worker is None:
            workers.append(worker := _Worker(next(numbers), document, home, api_url, at_once, events))
        entry = next_run(waiting, home)
        waiting.remove(entry)
        position, run = entry
        worker.execute(run, progress.run_started(run.run_id, run.name, position, len(runs)))

    with stop.on_signals():
        try:
            for _ in range(min(at_once, len(runs))):
                begin()
            while any(worker.run for worker in workers):
                if stop.noted is not None and not passed_on:
                    passed_on = True
                    waiting.clear()
                    _send(workers, stop.noted)
                try:
                    worker, event = events.get(timeout=_POLL_SECONDS)
                except Empty:
                    continue
                outcome = worker.take(event, stop.requested())
                if outcome is not None:
                    progress.run_ended(outcome.run.run_id, outcome.status)
                    yield outcome
                    run_ids = [run.run_id for run in runs]
                    if waiting and not is_cancelled(home.experiment(document.experiment.name), run_ids):
                        begin()
        except KeyboardInterrupt:
            _send(workers, signal.SIGINT, signal.SIGTERM)  # two signals, whether or not the first was passed on
            raise
        except BaseException:
            _send(workers, signal.SIGTERM)
            raise
        finally:
            for worker in workers:
                worker.end()


class _Worker:
    """Handle of a process that executes runs.

    Args:
        number: number in the name of its log.
        events: receives the worker's events, and None at its end.
    """

    def __init__(
        self, number: int, document: Document, home: Home, api_url: str, at_once: int, events: "_Events"
    ) -> None:
        self.run: RunPlan | None = None
        """The run that the worker executes; None while it is idle."""
        self._reporter: ProgressReporter
        self._alive = True
        self._home = home
        self._log = home.logs / f"parallel-{number}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log_size(self._log)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipelines.prefect.flows.parallel", api_url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"RPG_HOME": str(home.root), RUNS_AT_ONCE: str(at_once)},
                encoding="utf-8",
                start_new_session=True,  # a terminal's Ctrl-C is for this process, which passes it on
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self._write(document.to_json())
        threading.Thread(target=self._listen, args=(events,), name=f"worker-{number}", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether the worker can be given a run."""
        return self._alive and self.run is None

    def execute(self, run: RunPlan, reporter: ProgressReporter) -> None:
        """Sends the worker a run to execute."""
        self.run, self._reporter = run, reporter
        self._write(run.run_id)

    def take(self, event: list[Any] | None, request: StopRequest | None) -> RunOutcome | None:
        """Handles an event of the worker. Returns the run's outcome if the event ends the run; reports any other event.

        Args:
            event: the worker's event; None after it has ended.
            request: the request to stop that applies to all runs.
        """
        run = self.run
        if event is not None and event[0] != _ENDED:
            getattr(self._reporter, event[0])(*event[1:])
            return None
        self.run, self._alive = None, event is not None
        if run is None:
            return None
        return self._lost(run, request) if event is None else _read_outcome(run, event[1])

    def _lost(self, run: RunPlan, request: StopRequest | None) -> RunOutcome:
        """Returns the outcome of a run whose worker has died, by a signal to all workers or for another reason."""
        code = self.end()
        reap(self._home)
        if request is not None:
            return RunOutcome(run, "cancelled", StageStoppedError(request), interrupted=True)
        return RunOutcome(run, "failed", failure("the run's process", code, self._log, since=self._log_start))

    def send(self, number: signal.Signals) -> None:
        """Sends the worker a signal, unless it has ended."""
        self._process.send_signal(number)

    def end(self) -> int:
        """Waits until the worker has ended, and kills it if it does not. Returns its exit code."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _write(self, value: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: `_listen` reports that
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()

    def _listen(self, events: "_Events") -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                if line.endswith("\n"):  # a killed worker may leave half a line
                    events.put((self, json.loads(line)))
        events.put((self, None))


_Events = Queue[tuple[_Worker, list[Any] | None]]


def _send(workers: Iterable[_Worker], *signals: signal.Signals) -> None:
    for worker in workers:
        for number in signals:
            worker.send(number)


def _plain_outcome(status: str, error: Exception | None, *, interrupted: bool = False) -> dict[str, Any]:
    """Returns the outcome as JSON data without its run; an error becomes the text that the command shows."""
    plain: dict[str, Any] = {"status": status, "interrupted": interrupted}
    if isinstance(error, SpecError):
        plain |= {"issues": [asdict(issue) for issue in error.issues], "done": error.done}
    elif error is not None:
        plain |= {"error": str(error) or type(error).__name__, "users": isinstance(error, RpgError)}
    return plain


def _read_outcome(run: RunPlan, plain: Mapping[str, Any]) -> RunOutcome:
    error: Exception | None = None
    if "issues" in plain:
        error = SpecError(*map(read_issue, plain["issues"]), done=plain["done"])
    elif "error" in plain:
        error = (RpgError if plain["users"] else RuntimeError)(plain["error"])
    return RunOutcome(run, plain["status"], error, interrupted=plain["interrupted"])


class _Teller:
    """Sender of the events of a worker's runs to the command."""

    def __init__(self, channel: IO[str]) -> None:
        self._channel = channel

    def tell(self, event: str, *values: Any) -> None:
        """Writes one event."""
        self._channel.write(json.dumps([event, *values]) + "\n")
        self._channel.flush()

    def stage_started(self, stage: str, reason: str) -> None:
        """See ProgressReporter."""
        self.tell("stage_started", stage, reason)

    def training(self, progress: dict[str, Any]) -> None:
        """See ProgressReporter."""
        self.tell("training", progress)

    def waiting(self, text: str) -> None:
        """See ProgressReporter."""
        self.tell("waiting", text)

    def stage_ended(self, stage: str, outcome: str, seconds: float) -> None:
        """See ProgressReporter."""
        self.tell("stage_ended", stage, outcome, seconds)

    def note(self, text: str) -> None:
        """See ProgressReporter."""
        self.tell("note", text)


def main() -> None:
    """Runs a worker: `python -m pipelines.prefect.flows.parallel API_URL`; stdin has the frozen experiment, then run
    ids."""
    die_with_parent()
    teller = _Teller(os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library's output must not be read as an event
    home, stop = Home.from_environment(), Stop()
    with client_settings(home, sys.argv[1]), stop.on_signals():
        document = Document.from_json(json.loads(sys.stdin.readline()))
        for line in sys.stdin:
            teller.tell(_ENDED, _execute(document, json.loads(line), home, stop, teller))


def _execute(document: Document, run_id: str, home: Home, stop: Stop, teller: _Teller) -> dict[str, Any]:
    if wait_for_another(home, run_id, teller, stop):
        return _plain_outcome("cancelled", None)
    try:
        outcome = outcome_of(RunExecution(document, run_id, home, stop=stop, progress=teller))
    except RpgError as error:  # a file or package that the spec names has changed since the experiment was planned
        return _plain_outcome("failed", error)
    return _plain_outcome(outcome.status, outcome.error, interrupted=outcome.interrupted)


if __name__ == "__main__":
    main()
