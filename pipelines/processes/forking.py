"""Processes of a program whose imports are there already: forks of one process that this command keeps, `fork_server`.

A fork is what a new process would be: it has a session and a group of its own, the environment, directory, output and
signal handlers of a new one, and random states of its own; it ends with the command. A new process is started instead
where there is a GPU, whose driver no fork may share, and wherever the server refuses: a file that it has imported has
changed, an import has failed or left a thread. `RPG_FORK_STAGES=0` has each process begin anew.
"""

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from pipelines.processes.fork_server import LONGEST_MESSAGE, ROOM_FOR_TITLE
from specs.machine.parent import die_with_parent

FORK_STAGES = "RPG_FORK_STAGES"
"""Environment variable: 0 has each stage's process begin anew."""
_ACCELERATORS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg", "/proc/driver/nvidia")
"""What only a machine with a GPU has: NVIDIA's driver, AMD's, Windows's for its Linux."""
_OF_PREFECT = ("PREFECT_", "DO_NOT_TRACK")
"""Beginnings of the names of variables that a command sets once it has a server: no module of a stage reads them."""
_KILLED = -9


def may_fork() -> bool:
    """Whether processes of this machine may be forks: it is Linux without a GPU, and nobody forbids it."""
    here = sys.platform == "linux" and os.environ.get(FORK_STAGES) != "0"
    return here and not any(Path(path).exists() for path in _ACCELERATORS)


def fork(
    program: Sequence[str],
    imports: Sequence[str],
    output: BinaryIO,
    *,
    inherited: Mapping[str, str],
    environment: Mapping[str, str],
) -> "ForkedProcess | None":
    """A process of `python -m PROGRAM` with these modules imported; None where one has to be started anew.

    Args:
        program: its module and arguments.
        imports: modules, which the server imports the first time that they are asked for.
        output: its stdout and stderr.
        inherited: its environment, as the server has it from its own start.
        environment: on top of that; read by nothing that is imported.
    """
    if not may_fork() or threading.current_thread() is not threading.main_thread():
        return None
    told = {name: value for name, value in inherited.items() if name.startswith(_OF_PREFECT)}
    server = _server_for({name: value for name, value in inherited.items() if name not in told})
    request = {
        "program": list(program),
        "imports": list(imports),
        "directory": os.getcwd(),
        "environment": {**told, **environment},
    }
    try:
        process = server.fork(request, output.fileno())
    except BaseException:  # a process of which nobody would know must not begin later
        server.end()
        raise
    if process is None:
        server.end()
    return process


class ForkedProcess:
    """A fork, with what of `subprocess.Popen` the supervisor uses."""

    def __init__(self, server: "Server", pid: int, started: str) -> None:
        """
        Args:
            started: what `specs.machine.liveness.start_of` says of it. Its server waits for it, after which nobody can
                ask any more.
        """
        self._server = server
        self.pid = pid
        self.started = started
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code (negative: the signal that killed it); None while it runs."""
        if self.returncode is None:
            self._server.listen(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.returncode is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._server.listen(min(left, 1.0))
        return self.returncode


def _begin(theirs: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a server that is asked through the other end of a socket."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pipelines.processes.fork_server", ROOM_FOR_TITLE],
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, "PYTHONUNBUFFERED": "1", "DS_ACCELERATOR": "cpu"},
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


class Server:
    """The process whose forks are asked for, as this one sees it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.owner = os.getpid()
        self._forks: dict[int, ForkedProcess] = {}
        self._answers: list[dict[str, Any]] = []
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _begin(theirs, environment)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._channel.fileno() >= 0 and self._process.poll() is None

    def fork(self, request: Mapping[str, Any], output: int) -> ForkedProcess | None:
        """Asks for a process; None where it refuses, or ends."""
        message = json.dumps(request).encode()
        if len(message) > LONGEST_MESSAGE:
            return None
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._channel, [message], [output])
        while self.alive and not self._answers:
            self.listen(1.0)
        if not self._answers or "refused" in (answer := self._answers.pop()):
            return None
        self._forks[answer["pid"]] = process = ForkedProcess(self, answer["pid"], answer["started"])
        return process

    def listen(self, seconds: float) -> None:
        """Takes what it says within some seconds; where it has ended, so have its forks."""
        waiting = select.poll()
        waiting.register(self._channel, select.POLLIN)
        while waiting.poll(1000 * seconds):
            said = b""
            with suppress(ConnectionResetError):
                said = self._channel.recv(LONGEST_MESSAGE)
            if not said:
                self.end()
                return
            message = json.loads(said)
            if "ended" in message:
                self._forks.pop(message["ended"]).returncode = message["code"]
            else:
                self._answers.append(message)
                return
            seconds = 0.0

    def end(self) -> None:
        """Ends it and, by the kernel's hand, its forks."""
        self._channel.close()
        self._process.kill()
        self._process.wait()
        for process in self._forks.values():
            process.returncode = _KILLED
        self._forks.clear()


_servers: list[Server] = []
"""The one that this process keeps, once it has asked for a fork."""


def has_imports() -> bool:
    """Whether a server of forks runs, which keeps what earlier forks have imported."""
    return bool(_servers) and _servers[0].owner == os.getpid() and _servers[0].alive


def _server_for(environment: Mapping[str, str]) -> Server:
    """The server that began with this environment; one that began with another is ended."""
    if _servers and _servers[0].owner == os.getpid():
        if _servers[0].alive and _servers[0].environment == environment:
            return _servers[0]
        _servers[0].end()
    _servers[:] = [Server(environment)]
    return _servers[0]


@atexit.register
def end_server() -> None:
    """Ends the server that this process keeps, if it does."""
    if _servers and _servers[0].owner == os.getpid():
        _servers.pop().end()
