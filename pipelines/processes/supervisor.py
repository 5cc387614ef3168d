"""Starts a stage's process, watches it and ends it. No other module waits for a child.

A child gets its own session and process group, and the kernel kills it when the thread that started it ends
(PR_SET_PDEATHSIG): start children from the main thread only. Its pid and start time are on disk before the wait begins,
so that the next command can end the processes that a `kill -9` of this one has left.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import psutil

from pipelines.processes.forking import Forked, fork
from pipelines.processes.reap import ProcessRecord
from pipelines.processes.stop import StopRequest
from specs.machine.exit_cause import Cause
from specs.machine.liveness import pid_namespace_here
from specs.machine.parent import die_with_parent
from specs.machine.redacted_log import redacted_log

_POLL_SECONDS = 0.1
SERVER_PASSWORDS = (
    *("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"),
    *("RPG_READER_AUTH_STRING", "RPG_STUDIES_URL"),
)
"""Variables that stages and sinks do not get, because they need neither a server nor a database of studies."""
TIMEOUT_GRACE_SECONDS = 5.0
"""Seconds between the request to stop and the kill of a child that exceeds its time limit."""
TAIL_LINES = 15
"""Lines of a log in an error's message."""


class StageError(Exception):
    """A failure of a stage's process that is not a user's mistake. Retrying may help."""

    def __init__(self, message: str, log: Path | None = None, *, cause: Cause = "other") -> None:
        super().__init__(message)
        self.log = log
        self.cause = cause
        self.microbatch_tokens = 0
        """Tokens of the largest microbatch of a trainer that ran out of memory; 0 if unknown."""


class StageStoppedError(Exception):
    """The end of a stage on request."""

    def __init__(self, request: StopRequest) -> None:
        super().__init__(request.reason)
        self.request = request


class StagePausedError(Exception):
    """The pause of training at the requested step."""

    def __init__(self, step: int) -> None:
        super().__init__(f"paused at step {step}")
        self.step = step


@dataclass(frozen=True, slots=True)
class Child:
    """Description of a child process to start, with the path of its record."""

    stage: str
    command: Sequence[str]
    log: Path
    """File to which the child's stdout and stderr are appended, without secrets."""
    record: Path
    """The child's process.json, which exists while the process lives."""
    timeout_seconds: float = 0.0
    """Time limit in seconds; 0 disables it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to this process's own."""
    signal_children: bool = False
    """Whether the command is a launcher that would kill its ranks on SIGTERM. The ranks get the signal, and the
    launcher waits for them."""
    forks: bool = False
    """Whether the command is a Python module whose process may be a fork (`pipelines.processes.forking`)."""
    afterwards: Callable[[], None] = lambda: None
    """Function that ends processes that the command has started on other machines. It is called after the command's
    end, also after an error."""


def start(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    attached: bool = True,
    directory: Path | None = None,
    withheld: Sequence[str] = (),
    standard_input: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Starts a process in its own session.

    Args:
        log: its stdout and stderr are appended to this file.
        environment: variables in addition to this process's own.
        attached: the process dies with the thread that calls this.
        directory: its working directory; None means this process's.
        withheld: variables of this process's environment that the new process does not get.
        standard_input: its standard input: nothing, or the descriptor of the socket of its port.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        return _start(
            command,
            output,
            environment or {},
            attached=attached,
            directory=directory,
            withheld=withheld,
            standard_input=standard_input,
        )


def _start(
    command: Sequence[str],
    output: BinaryIO,
    environment: Mapping[str, str],
    *,
    attached: bool,
    directory: Path | None = None,
    withheld: Sequence[str] = (),
    standard_input: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command),
        stdin=standard_input,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**inherited(withheld), "PYTHONUNBUFFERED": "1", **environment},
        cwd=directory,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()) if attached else None,
    )


def inherited(withheld: Sequence[str]) -> dict[str, str]:
    """Returns this process's environment without some of its variables."""
    return {name: value for name, value in os.environ.items() if name not in withheld}


_Process = subprocess.Popen[bytes] | Forked


def _begin(child: Child, output: BinaryIO) -> _Process:
    """Starts a child's process: a fork if the child and the machine allow it."""
    if child.forks and list(child.command[:3]) == [sys.executable, "-P", "-m"]:
        own = inherited(SERVER_PASSWORDS)
        forked = fork(child.command[3:], output, inherited=own, environment=child.environment)
        if forked is not None:
            return forked
    return _start(child.command, output, child.environment, attached=True, withheld=SERVER_PASSWORDS)


def _record_of(process: _Process, stage: str) -> ProcessRecord:
    if isinstance(process, Forked):  # it may have ended already
        return ProcessRecord(process.pid, process.pid, process.started, stage, pid_namespace_here())
    return ProcessRecord.of(process.pid, stage)


class RunningChild:
    """A child that was started."""

    def __init__(self, child: Child, process: _Process) -> None:
        """Use `started`."""
        self._child = child
        self._process = process
        self._deadline = time.monotonic() + (child.timeout_seconds or float("inf"))

    def poll(self) -> int | None:
        """Returns the exit code, or the negative number of the signal that killed the child; None while it runs.

        Raises:
            StageError: the time limit is exceeded; the child has been ended.
        """
        code = self._process.poll()
        if code is None and time.monotonic() > self._deadline:
            self.end(TIMEOUT_GRACE_SECONDS)
            stage, limit = self._child.stage, self._child.timeout_seconds
            raise StageError(f"{stage} ran longer than {limit:g} s and was stopped", self._child.log, cause="hung")
        return code

    def end(self, grace: float) -> None:
        """Asks the child to end, waits `grace` seconds, and kills the remaining processes of its group."""
        _end(self._child, self._process, grace)


@contextlib.contextmanager
def started(child: Child) -> Iterator[RunningChild]:
    """Starts a child. Ends the child and the processes that it has started elsewhere at the end of the block, also
    after an error."""
    child.log.parent.mkdir(parents=True, exist_ok=True)
    with redacted_log(child.log, {**os.environ, **child.environment}) as output:
        process = _begin(child, output)
        record = _record_of(process, child.stage)
        running = RunningChild(child, process)
        try:
            record.write(child.record)
            yield running
        finally:
            # This also runs on KeyboardInterrupt and Prefect's exceptions, so that no process outlives the block.
            running.end(0.0)
            child.afterwards()
            if ProcessRecord.read(child.record) == record:  # else another process has taken the run over
                child.record.unlink()


def supervise(
    child: Child, *, stop: Callable[[], StopRequest | None] = lambda: None, tick: Callable[[], None] = lambda: None
) -> int:
    """Runs a child to its end. Returns its exit code, or the negative number of the signal that killed it.

    Args:
        stop: called ten times a second; a request ends the child (SIGTERM, the request's grace, SIGKILL of the group).
        tick: called ten times a second, in this thread.
    Raises:
        StageStoppedError: `stop` returned a request.
        StageError: the time limit is exceeded.
    """
    with started(child) as running:
        while (code := running.poll()) is None:
            if request := stop():
                running.end(request.grace)
                raise StageStoppedError(request)
            tick()
            time.sleep(_POLL_SECONDS)
    return code


def _end(child: Child, process: _Process, grace: float) -> None:
    """See `RunningChild.end`."""
    if process.poll() is None and grace > 0:
        _interrupt(child, process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _interrupt(child: Child, process: _Process) -> None:
    targets = [process.pid]
    if child.signal_children:
        with contextlib.suppress(psutil.Error):
            targets = [rank.pid for rank in psutil.Process(process.pid).children()] or targets
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def log_size(log: Path) -> int:
    """Returns a log's length in bytes; 0 if the file is missing."""
    return log.stat().st_size if log.exists() else 0


def log_tail(log: Path, lines: int = TAIL_LINES, *, since: int = 0) -> str:
    """Returns the last lines of a log after its first `since` bytes; empty if it cannot be read."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - 64 * 1024))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    return ""


def failure(
    stage: str, code: int, log: Path, *, since: int = 0, why: str = "", faults: Sequence[str] = ()
) -> StageError:
    """Returns the error of a child that failed: its exit code, the reason if it is known, faults of the hardware, and
    the end of its log after the first `since` bytes."""
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    end += f": {why}" if why else ""
    tail = "\n".join(f"    {line}" for line in log_tail(log, since=since).splitlines())
    return StageError(f"{'; '.join([f'{stage} {end}', *faults])}; the end of {log}:\n{tail}", log)
