"""Processes of the tests whose imports are made already: forks of the fork server that this process has.

Torch, transformers and Prefect take longer to import than a tiny run takes. The product forks its stages for the same
reason; the tests fork trainers, ranks and commands from a server of the same kind.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from pipelines.processes import fork_server, forking
from pipelines.processes.forking import Forked

ROOT = str(Path(__file__).parents[1])
ROOM = "x" * 400
"""What stands for a home's path in the environment that others see of the server."""
_READ_LATE = fork_server.READ_LATE
READ_LATE = (*_READ_LATE, "RPG_", "PYTEST_", "TMPDIR", "OMP_NUM_THREADS")
"""Beginnings of names of variables that nothing reads while it is imported."""
_start_server = forking.start_server


class Fork:
    """A fork, with the parts of `subprocess.Popen` that the tests use."""

    def __init__(self, process: Forked, output: BinaryIO, errors: BinaryIO | None = None) -> None:
        """
        Args:
            output: a file of its stdout; of its stderr too, if that has no file.
        """
        self._process = process
        self._files = [output] if errors is None else [output, errors]
        self._said = ["", ""]
        self.pid = process.pid
        self.poll, self.wait, self.terminate, self.kill = process.poll, process.wait, process.terminate, process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def send_signal(self, number: int) -> None:
        self._process._send(signal.Signals(number))

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it has said, once it has ended."""
        self._process.wait(timeout)
        for which, file in enumerate(self._files):
            if not file.closed:
                with file:
                    file.seek(0)
                    self._said[which] = file.read().decode(errors="replace")
        return self._said[0], self._said[1]


def fork(
    program: Sequence[str], output: BinaryIO, environment: Mapping[str, str], *, late: Mapping[str, str] | None = None
) -> Forked | None:
    """Starts `python -m PROGRAM` with modules imported; returns None if it must start without a fork.

    Args:
        environment: its variables. What is imported sees those that are not `READ_LATE`.
        late: further ones, which what is imported does not see.
    """
    use_imports()
    return forking.fork(program, output, inherited=environment, environment=late or {})


def use_imports() -> None:
    """Has the fork server of this process, which stages are forked from too, import what commands need."""
    forking.PRELOAD, fork_server.READ_LATE = "tests.fork_preload", READ_LATE
    forking.start_server = _start_tests_server


_kept: list[tuple[Mapping[str, str], Any]] = []
"""Environments and their servers: the first server, and one of an environment that some test has changed."""


def _start_tests_server(environment: Mapping[str, str]) -> None:
    path = os.pathsep.join(filter(None, [ROOT, environment.get("PYTHONPATH", "")]))  # where it finds its modules
    steady = {name: value for name, value in environment.items() if not name.startswith(READ_LATE)}
    forking._server = _server_for(steady)
    # `READ_LATE` is empty here so that the home's placeholder gets there.
    fork_server.READ_LATE = ()
    try:
        _start_server({"RPG_HOME": ROOM, **steady, "OMP_NUM_THREADS": "1", "PYTHONPATH": path})
    finally:
        fork_server.READ_LATE = READ_LATE


def _server_for(steady: Mapping[str, str]) -> Any:
    """The server of an environment; of another, whose forks begin anew, where that one's place is still needed."""
    if found := next((server for kept, server in _kept if kept == steady), None):
        return found
    if len(_kept) == 2:
        forking._server = _kept[-1][1]
        if forking._server._forkserver_pid and psutil.Process(forking._server._forkserver_pid).children():
            return _kept[0][1]
        forking.end_server()
        _kept.pop()
    _kept.append((steady, forkserver.ForkServer()))
    return _kept[-1][1]
