"""Processes whose imports are made already: forks of `multiprocessing`'s fork server, or of this very process.

A fork is what a new process would be: it has a session and a group of its own, the environment, directory, output and
signal handlers of a new one, and random states of its own; it ends with the command. A new process is started instead
where there is a GPU, whose driver no fork may share. `RPG_FORK_STAGES=0` has each process begin anew.
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
"""Environment variable: 0 has each stage's process begin anew."""
PRELOAD = "pipelines.processes.fork_preload"
"""Module that the server imports as it starts."""
_ACCELERATORS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg", "/proc/driver/nvidia")
"""What only a machine with a GPU has: NVIDIA's driver, AMD's, Windows's for its Linux."""
_POLL_SECONDS = 0.02
_server: Any = forkserver.ForkServer()
"""Not the one of `multiprocessing` itself, from which whoever calls us may fork processes."""
_has_forked = False


def may_fork() -> bool:
    """Returns whether processes of this machine may be forks: it is Linux without a GPU, and nobody forbids it."""
    here = sys.platform == "linux" and os.environ.get(FORK_STAGES) != "0"
    return here and not any(Path(path).exists() for path in _ACCELERATORS)


def forks_stages(experiment: Experiment, slots: Sequence[str] = ()) -> bool:
    """Returns whether stages of the experiment may be forks: they have no GPUs, and an engine that starts no
    processes."""
    return not slots and experiment.rollout.engine != "vllm"


def has_forked() -> bool:
    """Returns whether a server runs that has the imports, as this process has asked it for a fork."""
    return _has_forked


class Forked:
    """A fork, with what of `subprocess.Popen` its keepers use."""

    def __init__(self, pid: int, exit_code: Callable[[], int | None]) -> None:
        """Use `fork` or `fork_self`.

        Args:
            exit_code: returns None while it runs; asked until it returns a code.
        """
        self.pid = pid
        self.returncode: int | None = None
        self.started = ""
        """What `specs.machine.liveness.start_of` says of it; empty if it ended at once."""
        self._exit_code = exit_code
        with suppress(psutil.Error):
            self.started = start_of(pid)
        with suppress(ProcessLookupError):  # it has ended
            while os.getpgid(pid) != pid:  # by which its group can be ended
                time.sleep(0.001)

    def poll(self) -> int | None:
        """Returns the exit code (negative: the signal that killed it); None while it runs."""
        if self.returncode is None:
            self.returncode = self._exit_code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns its exit code, once it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_SECONDS)
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


def fork(
    program: Sequence[str], output: BinaryIO, *, inherited: Mapping[str, str], environment: Mapping[str, str]
) -> Forked | None:
    """Starts `python -m PROGRAM` with the stages' modules imported; None where it has to be started otherwise.

    Args:
        program: its module and arguments.
        output: its stdout and stderr.
        inherited: its environment, with which the server starts.
        environment: on top of that; read by nothing that is imported.
    """
    global _has_forked
    if not may_fork() or threading.current_thread() is not threading.main_thread():
        return None
    request = pickle.dumps(Program(tuple(program), os.getcwd(), dict(inherited), dict(environment)))
    start_server(inherited)
    # The server, `multiprocessing.spawn._main` in it, reads settings, here none, and what it is to run.
    status, channel = _server.connect_to_new_process([output.fileno()])
    try:
        with open(channel, "wb") as file, suppress(BrokenPipeError):
            file.write(pickle.dumps({}) + request)
        pid = forkserver.read_signed(status)
    except EOFError:  # the server has ended
        os.close(status)
        return None
    except BaseException:  # without its request a fork ends
        os.close(status)
        raise
    _has_forked = True
    return Forked(pid, lambda: _told_code(status))


def start_server(environment: Mapping[str, str]) -> None:
    """Starts the server, unless it runs, with an environment."""
    wanted = {name: value for name, value in environment.items() if not name.startswith(fork_server.READ_LATE)}
    _server.set_forkserver_preload([PRELOAD])
    with _as_environment({**wanted, **OF_SERVER}):
        _server.ensure_running()


@atexit.register
def end_server() -> None:
    """Ends the server, if this process has one, and waits for it. The kernel ends its forks; the tracker of resources
    that `multiprocessing` starts beside it ends with this process."""
    if _server._forkserver_pid is not None:
        os.kill(_server._forkserver_pid, signal.SIGKILL)
        _server._stop()


@contextmanager
def _as_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Within the block this process has another environment: `multiprocessing` takes none for its server. Variables
    that are the same in both are not set: setproctitle knows the place of a title by them."""
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
    """Returns the exit code that the server has told through a pipe, which is closed then; None while there is none.
    The fork of a server that is killed is killed with it."""
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
    """Forks this process to run a function with all that is imported; None where a process has to be started anew:
    see `may_fork`, and threads of this process which the fork would lack.

    The fork has a session of its own, dies with the thread that calls this, and has no file of this process open.

    Args:
        log: its stdout and stderr are appended.
        environment: on top of this process's own.
        standard_input: what it has as that.
    """
    if not may_fork() or lost_threads():
        return None
    log.parent.mkdir(parents=True, exist_ok=True)
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
