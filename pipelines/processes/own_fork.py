"""A process that begins with all that this one has imported: a fork of this very process, which runs a function."""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pipelines.processes.fork_server import lost_threads
from pipelines.processes.forking import may_fork
from specs.machine.parent import die_with_parent

_LOOK_SECONDS = 0.05


class OwnFork:
    """The fork, with what of `subprocess.Popen` its keeper uses."""

    def __init__(self, pid: int) -> None:
        """Use `fork_self`."""
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code (negative: the signal that killed it); None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_LOOK_SECONDS)
        return code

    def terminate(self) -> None:
        """Sends SIGTERM, unless it has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL, unless it has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork_self(
    run: Callable[[], None], log: Path, *, environment: Mapping[str, str], standard_input: int
) -> OwnFork | None:
    """A fork of this process that runs a function; None where a process has to be started anew: see
    `pipelines.processes.forking.may_fork`, and threads of this process which the fork would lack.

    It has a session of its own, dies with the thread that calls this, and no file of this process is open in it.

    Args:
        log: its stdout and stderr are appended.
        environment: on top of this process's own.
        standard_input: what it has as that.
    """
    if not may_fork() or lost_threads():
        return None
    log.parent.mkdir(parents=True, exist_ok=True)
    ready, own = os.pipe()
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if (pid := os.fork()) == 0:
        code = 1
        with suppress(BaseException):  # nothing of the caller's may go on here
            try:
                _become(parent, log, environment, standard_input)
                run()
                code = 0
            except BaseException:
                traceback.print_exc()
        os._exit(code)
    os.close(own)
    os.read(ready, 1)  # nothing comes but the end of the pipe, once it leads a group of its own
    os.close(ready)
    return OwnFork(pid)


def _become(parent: int, log: Path, environment: Mapping[str, str], standard_input: int) -> None:
    os.setsid()
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with open(log, "ab") as output:
        os.dup2(standard_input, 0)
        for standard in (1, 2):
            os.dup2(output.fileno(), standard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # locks of this home among them
    os.environ.update(environment)
