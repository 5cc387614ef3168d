"""Processes of the tests whose imports are there already: forks of one process that this one keeps.

Torch, transformers and Prefect take longer to import than a tiny run takes. The product forks its stages for the same
reason; the tests fork trainers, ranks and commands from a server of the product's own kind.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipelines.processes import forking
from pipelines.processes.forking import ForkedProcess, Server, may_fork

COMMAND_IMPORTS = ("tests.pipelines.command_imports",)
"""What commands, their API and their stages import."""

ROOM = "x" * 400
"""What stands for a home's path in the environment that others see of the server."""
READ_LATE = ("RPG_", "PREFECT_", "PYTEST_", "TMPDIR")
"""Beginnings of names of variables that nothing reads while it is imported."""


class Fork:
    """A fork, with what of `subprocess.Popen` the tests use."""

    def __init__(self, process: ForkedProcess, output: BinaryIO, errors: BinaryIO | None = None) -> None:
        """
        Args:
            output: a file of its stdout; of its stderr too, where there is none for that.
        """
        self._process = process
        self._files = [output] if errors is None else [output, errors]
        self._said = ["", ""]
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it has said, once it has ended."""
        self._process.wait(timeout)
        for which, file in enumerate(self._files):
            if not file.closed:
                with file:
                    file.seek(0)
                    self._said[which] = file.read().decode(errors="replace")
        return self._said[0], self._said[1]


_begin_anew = forking._begin
_ROOT = str(Path(__file__).parents[1])
_PYTHON = sys.executable
_is_beginning = False
"""Whether the server that this process keeps begins: that one has to do so anew."""


def fork_imports(theirs: socket.socket, environment: Mapping[str, str]) -> "Fork | subprocess.Popen[bytes]":
    """Stands in for `forking._begin`: a fork in place of a process that first imports everything."""
    if _is_beginning or sys.executable != _PYTHON:  # a test has put a program of its own in its place
        return _begin_anew(theirs, environment)
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as request:
        json.dump(dict(environment), request)
    with open(os.dup(theirs.fileno()), "wb", buffering=0) as channel:
        if process := fork(["tests.forked_imports", request.name], COMMAND_IMPORTS, channel, environment, lasts=True):
            return Fork(process, channel)
    os.unlink(request.name)
    return _begin_anew(theirs, environment)


@dataclass
class _Kept:
    """A server that this process keeps."""

    server: Server
    forks: list[ForkedProcess]
    """Those of it that do not last as long as it does."""

    @property
    def is_needed(self) -> bool:
        """Whether forks would end with it."""
        return any(process.poll() is None for process in self.forks)


_MOST_KEPT = 2
"""The first server, which is mostly of the environment that tests begin with, and one of an environment that some test
has changed."""
_kept: list[_Kept] = []


def fork(
    program: Sequence[str],
    imports: Sequence[str],
    output: BinaryIO,
    environment: Mapping[str, str],
    *,
    late: Mapping[str, str] | None = None,
    lasts: bool = False,
) -> ForkedProcess | None:
    """`python -m PROGRAM` with modules imported; None where it has to begin anew.

    Args:
        environment: its variables. What is imported sees those that are not `READ_LATE`.
        late: further ones, which what is imported does not see.
        lasts: it ends when it is not needed, at the latest with the server that it is a fork of.
    """
    steady = {name: value for name, value in environment.items() if not name.startswith(READ_LATE)}
    if not may_fork() or threading.current_thread() is not threading.main_thread():
        return None
    if (kept := _kept_for(steady)) is None:
        return None
    own = {name: value for name, value in environment.items() if name not in steady} | dict(late or {})
    asked: dict[str, Any] = {
        "program": list(program),
        "imports": list(imports),
        "directory": os.getcwd(),
        "environment": {"PYTHONPATH": steady.get("PYTHONPATH", "")} | own,
    }
    try:
        process = kept.server.fork(asked, output.fileno())
    except BaseException:  # its answer would be taken for that to the next request
        _end(kept)
        raise
    if process is None:
        _end(kept)
    elif not lasts:
        kept.forks.append(process)
    return process


def _kept_for(steady: Mapping[str, str]) -> _Kept | None:
    """None: forks of a server that would have to end for this one still run."""
    path = os.pathsep.join(filter(None, [_ROOT, steady.get("PYTHONPATH", "")]))  # where it finds its modules
    wanted = {**steady, "RPG_HOME": ROOM, "PYTHONPATH": path}
    if _kept and _kept[0].server.owner != os.getpid():  # this is a fork of the process that keeps them
        _kept.clear()
    for kept in [kept for kept in _kept if not kept.server.alive]:
        _end(kept)
    if found := next((kept for kept in _kept if kept.server.environment == wanted), None):
        return found
    if len(_kept) == _MOST_KEPT:
        if _kept[-1].is_needed:
            return None
        _end(_kept[-1])
    global _is_beginning
    _is_beginning = True
    try:
        _kept.append(_Kept(Server(wanted), []))
    finally:
        _is_beginning = False
    return _kept[-1]


def _end(kept: _Kept) -> None:
    _kept.remove(kept)
    kept.server.end()


@atexit.register
def _end_all() -> None:
    """Ends the servers that this process keeps."""
    for kept in [kept for kept in _kept if kept.server.owner == os.getpid()]:
        _end(kept)
