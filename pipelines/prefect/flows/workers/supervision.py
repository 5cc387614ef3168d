"""`rpg worker`: supervises a Prefect process worker and the flows that it has started.

Prefect's worker ends when the server is unreachable for some minutes; this process restarts it, and its flows continue
meanwhile. When asked to end, this process ends Prefect's worker first, so that no further flow begins, then lets the
flows save and give their runs back to the queue.
"""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import FrameType

from pipelines.home.home import Home
from pipelines.prefect.flows.workers.flow_process import SUPERVISOR, FlowProcess, flow_processes, identity, stop_flows
from specs.machine.parent import die_with_parent

_POLL_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 60.0
_SETTLED_SECONDS = 60.0
"""Seconds after which a running worker counts as started. If it ends later, its successor is started at once."""


class WorkerSupervisor:
    """Supervisor that keeps a Prefect worker running until SIGTERM or SIGINT. Main thread only."""

    def __init__(self, home: Home, command: list[str], environment: dict[str, str], grace: float) -> None:
        """
        Args: command, environment: those of Prefect's worker. grace: seconds that each flow has to save its stage's
        state after this process is asked to end.
        """
        self._home = home
        self._command = command
        self._identity = identity(os.getpid())
        self._environment = os.environ | environment | {SUPERVISOR: self._identity}
        self._grace = grace
        self._signalled = False
        self._worker: subprocess.Popen[bytes] | None = None
        self._started_at = self._start_at = 0.0
        self._pause = 1.0

    def run(self) -> None:
        """Runs the worker. Returns when it was asked to end and every flow has stopped."""
        # Set in any case: a shell that starts a job in the background ignores SIGINT for it.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        try:
            while not self._signalled:
                self._keep_worker()
                time.sleep(_POLL_SECONDS)
        finally:
            if self._worker is not None:
                self._worker.kill()
                self._worker.wait()
            while flows := self._flows():
                stop_flows(flows, signal.SIGTERM, self._grace)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True

    def _flows(self) -> list[FlowProcess]:
        """Returns the flows that run for this worker, or for a killed predecessor on this host."""
        flows = [flow for flow in flow_processes(self._home) if flow.is_alive]
        return [flow for flow in flows if flow.supervisor == self._identity or flow.is_orphan]

    def _keep_worker(self) -> None:
        now = time.monotonic()
        if self._worker is None:
            # Prefect's worker does not know a flow of its killed predecessor, and would start another beside it.
            if now >= self._start_at and not self._flows():
                self._worker = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
                self._started_at = now
        elif (code := self._worker.poll()) is not None:
            self._worker = None
            settled = now - self._started_at > _SETTLED_SECONDS
            self._pause = 1.0 if settled else min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
            self._start_at = now + self._pause
            print(f"Prefect's worker ended with {code}; another one follows", file=sys.stderr, flush=True)
