"""Processes that start with their modules imported: forks of `multiprocessing`'s fork server, or of this process.

A fork behaves like a new process: it has a session and a group of its own, the environment, directory, output and
signal handlers of a new process, and random states of its own; it ends with the command. On a machine with a GPU a new
process is started instead, since no fork may share the GPU's driver. `RPG_FORK_STAGES=0` starts a new process for each
stage.
"""

import atexit
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from pipelines.processes import fork_server
from pipelines.processes.fork_server import OF_SERVER, Program, lost_threads
from specs.machine.liveness import start_of
from specs.machine.parent import die_with_parent
from specs.schema.experiment import Experiment

FORK_STAGES = "RPG_FORK_STAGES"
"""Environment variable: 0 starts a new process for each stage."""
PRELOAD = "pipelines.processes.fork_preload"
"""Module that the server imports as it starts."""
_ACCELERATORS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg", "/proc/driver/nvidia")
"""Paths that exist only on a machine with a GPU: the drivers of NVIDIA, of AMD, and of Windows' subsystem for Linux."""
_POLL_SECONDS = 0.02
_server: Any = forkserver.ForkServer()
"""Our fork server. It is separate from `multiprocessing`'s global one, which the calling program may use for its own
forks."""
_has_forked = False


def may_fork() -> bool:
    """Returns whether processes on this machine may be forks: it runs Linux without a GPU, and RPG_FORK_STAGES allows
    forks."""
    here = sys.platform == "linux" and os.environ.get(FORK_STAGES) != "0"
    return here and not any(Path(path).exists() for path in _ACCELERATORS)


def forks_stages(experiment: Experiment, slots: Sequence[str] = ()) -> bool:
    """Returns whether stages of the experiment may be forks: they use no GPUs, and their engine starts no processes."""
    return not slots and experiment.rollout.engine != "vllm"


def has_forked() -> bool:
    """Returns whether this process has a fork server, which exists once a fork was requested."""
    return _has_forked


class Forked:
    """A fork, with those methods of `subprocess.Popen` that its callers use."""

    def __init__(self, pid: int, exit_code: Callable[[], int | None]) -> None:
        """Only `fork` and `fork_self` call this.

        Args:
            exit_code: returns None while the fork runs; called until it returns a code.
        """
        self.pid = pid
        self.returncode: int | None = None
        self.started = ""
        """Result of `specs.machine.liveness.start_of`; empty if the fork ended at once."""
        self._exit_code = exit_code
        with suppress(psutil.Error):
            self.started = start_of(pid)
        with suppress(ProcessLookupError):  # it has ended
            while os.getpgid(pid) != pid:  # its group is ended by this id
                time.sleep(0.001)

    def poll(self) -> int | None:
        """Returns the exit code, or the negative number of the signal that killed the fork; None while it runs."""
        if self.returncode is None:
            self.returncode = self._exit_code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the fork's end and returns its exit code. Raises subprocess.TimeoutExpired after `timeout`
        seconds."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def terminate(self) -> None:
        """Sends SIGTERM, unless the fork has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL, unless the fork has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork(
    program: Sequence[str], output: BinaryIO, *, inherited: Mapping[str, str], environment: Mapping[str, str]
) -> Forked | None:
    """Starts `python -m PROGRAM` in a fork that has the stages' modules imported. Returns None if the caller has to
    start a new process.

    Args:
        program: the program's module and arguments.
        output: its stdout and stderr.
        inherited: its environment, which the server gets at its start.
        environment: variables in addition to that, which no imported module reads.
    """
    global _has_forked
    if not may_fork() or threading.current_thread() is not threading.main_thread():
        return None
    request = pickle.dumps(Program(tuple(program), os.getcwd(), dict(inherited), dict(environment)))
    start_server(inherited)
    # The server, `multiprocessing.spawn._main` in it, reads settings, none here, and the program to run.
    status, channel = _server.connect_to_new_process([output.fileno()])
    try:
        with open(channel, "wb") as file, suppress(BrokenPipeError):
            file.write(pickle.dumps({}) + request)
        pid = forkserver.read_signed(status)
    except EOFError:  # the server has ended
        os.close(status)
        return None
    except BaseException:  # a fork ends if it gets no request
        os.close(status)
        raise
    _has_forked = True
    return Forked(pid, lambda: _told_code(status))


def start_server(environment: Mapping[str, str]) -> None:
    """Starts the server with an environment, unless it runs."""
    wanted = {name: value for name, value in environment.items() if not name.startswith(fork_server.READ_LATE)}
    _server.set_forkserver_preload([PRELOAD])
    with _as_environment({**wanted, **OF_SERVER}):
        _server.ensure_running()


@atexit.register
def end_server() -> None:
    """Ends the server, if this process has one, and waits for it. The kernel ends its forks. The resource tracker,
    which `multiprocessing` starts beside the server, ends with this process."""
    if _server._forkserver_pid is not None:
        os.kill(_server._forkserver_pid, signal.SIGKILL)
        _server._stop()


@contextmanager
def _as_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Replaces this process's environment within the block, because `multiprocessing` accepts no environment for its
    server. Variables whose values do not change are not set again, because setproctitle uses their addresses to find
    the title's memory."""
    own = dict(os.environ)
    differing = [name for name, _ in own.items() ^ environment.items()]
    _set(differing, environment)
    try:
        yield
    finally:
        _set(differing, own)


def _set(names: Iterable[str], environment: Mapping[str, str]) -> None:
    for name in names:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            os.environ.pop(name, None)


def _told_code(status: int) -> int | None:
    """Returns the exit code that the server has sent through a pipe, and closes the pipe; None if it has not sent one
    yet. If the server is killed, its forks are killed with it."""
    waiting = select.poll()
    waiting.register(status)
    if not waiting.poll(0):
        return None
    try:
        return int(forkserver.read_signed(status))
    except EOFError:
        return -signal.SIGKILL
    finally:
        os.close(status)


def fork_self(
    run: Callable[[], None], log: Path, *, environment: Mapping[str, str], standard_input: int
) -> Forked | None:
    """Forks this process, with its imports, to run a function. Returns None if a new process has to be started instead:
    `may_fork` is false, or this process has threads, which the fork would lack.

    The fork has a session of its own, dies with the thread that calls this, and has no file of this process open.

    Args:
        log: its stdout and stderr are appended to this file.
        environment: variables in addition to this process's own.
        standard_input: descriptor of its standard input.
    """
    if not may_fork() or lost_threads():
        return None
    log.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if (pid := os.fork()) == 0:
        code = 1
        with suppress(BaseException):  # no code of the caller may run here
            try:
                _become(parent, log, environment, standard_input)
                run()
                code = 0
            except BaseException:
                traceback.print_exc()
        os._exit(code)
    return Forked(pid, lambda: _waited_code(pid))


def _waited_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


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
