"""The processes that send a run's record to its sinks during the run. The run depends on none of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipelines.home.home import Home
from pipelines.processes.supervisor import SERVER_PASSWORDS, log_size, log_tail, start
from pipelines.sinks.sending import noted
from rpg.recording.segments import SegmentWriter
from specs.machine.files import read_json
from specs.schema.execution import Sink

SINK_FAILED = "sink_failed"
"""Name of the event that a sink did not get the whole run."""
_RETRY_SECONDS = 60.0
"""Seconds between a failure and the next attempt, during the run."""
_END_SECONDS = 30.0
"""Longest time in seconds that an ended run waits for its sinks."""
_STOP_SECONDS = 5.0
"""Seconds that sinks have to finish after a run was stopped."""
_POLL_SECONDS = 0.1
_NO_ATTEMPT = 0
"""Attempt number of rows that no trainer wrote. The start of a trainer does not supersede them."""


class SinkProcesses:
    """A process for each sink of a run. One that fails is restarted at intervals."""

    def __init__(self, home: Home, run_id: str, sinks: Sequence[Sink]) -> None:
        self._home, self._run_id, self._sinks = home, run_id, sinks
        self._processes: dict[Sink, subprocess.Popen[bytes]] = {}
        self._failed_at: dict[Sink, float] = {}
        """Sink -> time of its failure, for those that are to be restarted."""
        self._log_starts: dict[Sink, int] = {}
        """Sink -> length of its log when its process was started, in bytes."""
        self._failures: dict[Sink, str] = {}
        """Sink -> its last failure."""

    @contextmanager
    def sending(self, warn: Callable[[str], None]) -> Iterator[None]:
        """Sends the run's record within the block, as the record grows. At the end of the block, waits until the rest
        is sent, at most half a minute. Call it in the main thread, while the run is held.

        Args:
            warn: called with a line about a sink that fails.
        """
        self._warn = warn
        for sink in self._sinks:
            self._start(sink)
        try:
            yield
            self._finish()
        finally:
            for process in self._processes.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def look(self) -> None:
        """Reports failed processes, and restarts them a minute later. Call it at intervals."""
        for sink, process in list(self._processes.items()):
            if not process.poll():
                continue
            if sink not in self._failed_at:
                self._failed_at[sink] = time.monotonic()
                self._fail(sink, noted(self._home, self._run_id, sink).error or self._said(sink))
            elif time.monotonic() - self._failed_at[sink] > _RETRY_SECONDS:
                self._start(sink)

    def _start(self, sink: Sink) -> None:
        self._failed_at.pop(sink, None)
        command = [sys.executable, "-P", "-m", "pipelines.sinks", self._run_id, sink.model_dump_json()]
        own = {"RPG_HOME": str(self._home.root)}
        self._log_starts[sink] = log_size(self._log(sink))
        self._processes[sink] = start(command, self._log(sink), environment=own, withheld=SERVER_PASSWORDS)

    def _fail(self, sink: Sink, message: str) -> None:
        if self._failures.get(sink) != message:
            self._failures[sink] = message
            self._warn(f"{sink.type}: {message}; the run continues; `rpg sync {self._run_id}` sends what is missing")

    def _finish(self) -> None:
        """Waits for the processes, and records the sinks that lack something."""
        state = read_json(self._home.run(self._run_id) / "state.json")
        seconds = _END_SECONDS if state["status"] in ("finished", "failed") else _STOP_SECONDS
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes.values()):
            time.sleep(_POLL_SECONDS)
        self.look()
        for sink, process in self._processes.items():
            if process.poll() is None:
                self._fail(sink, self._failures.get(sink) or f"not done {seconds:g} s after the run")
            elif not process.poll():
                self._failures.pop(sink, None)  # a later attempt sent everything
        if self._failures:
            self._record_failures()

    def _record_failures(self) -> None:
        step = read_json(self._home.run(self._run_id) / "progress.json").get("step", 0)
        writer = SegmentWriter(self._home.run(self._run_id), self._run_id, _NO_ATTEMPT)
        for sink, message in self._failures.items():
            writer.event(step, SINK_FAILED, f"{sink.type}: {message}")
        with contextlib.suppress(FileExistsError):  # an earlier call at the same position has recorded the same
            writer.flush()

    def _said(self, sink: Sink) -> str:
        return log_tail(self._log(sink), 1, since=self._log_starts[sink])

    def _log(self, sink: Sink) -> Path:
        return self._home.run(self._run_id) / "logs" / f"sink-{sink.type}.log"
