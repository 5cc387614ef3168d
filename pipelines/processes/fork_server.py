"""`python -m pipelines.processes.fork_server`: processes that begin with what they need imported, as forks of this one.

Its standard input is a socket of `pipelines.processes.forking`, which asks for one process after another. Importing
torch and transformers takes longer than a tiny run; here each module is imported once for all of them. The process
imports and forks: it computes nothing, has one thread, and ends, with all its forks, when the other end is closed.
"""

import gc
import importlib
import io
import json
import os
import runpy
import select
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from specs.machine.liveness import start_of
from specs.machine.parent import before_torch, die_with_parent

_MAY_BE_LOST = {"jemalloc_bg_thd"}
"""Threads that their library does without in a fork: pyarrow's allocator gives memory back by itself then."""
ROOM_FOR_TITLE = " " * 500
"""An argument that is nothing but room for the title of a fork."""
LONGEST_MESSAGE = 1 << 16
"""Bytes of a message of either side."""


class ForkServer:
    """Forks this process as it is asked to, and tells how each fork ended."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._forks: dict[int, int] = {}
        """Descriptor -> process id of each fork that has not ended."""
        self._changed_at: dict[str, int] = {}
        """Time of change of each imported file, as it was when it was imported."""
        self._note_files()

    def serve(self) -> list[str]:
        """Returns in a fork alone, with its program's module and arguments."""
        while True:
            waiting = select.poll()
            for descriptor in (self._channel.fileno(), *self._forks):
                waiting.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in waiting.poll()}
            for descriptor in ready & self._forks.keys():
                self._tell_end(descriptor)
            if self._channel.fileno() not in ready:
                continue
            message, descriptors, _, _ = socket.recv_fds(self._channel, LONGEST_MESSAGE, 1)
            if not message:
                os._exit(0)  # the kernel ends the forks
            asked, (output,) = json.loads(message), descriptors
            refusal = self._import(asked["imports"], output)
            if refusal:
                self._send(refused=refusal)
            elif (pid := self._fork(asked, output)) == 0:
                program: list[str] = asked["program"]
                return program
            else:
                self._forks[os.pidfd_open(pid)] = pid
                self._send(pid=pid, started=start_of(pid))
            os.close(output)

    def _fork(self, asked: dict[str, Any], output: int) -> int:
        """Returns 0 in the fork, and here its process id once it leads a group of its own."""
        ready, own = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(ready)
            self._become(asked, output)
        os.close(own)
        if pid:
            os.read(ready, 1)  # nothing comes but the end of the pipe
            os.close(ready)
        return pid

    def _import(self, names: list[str], output: int) -> str:
        """Imports modules; what they print goes to the output. Returns why no process may be forked then; empty: one
        may."""
        if changed := next((path for path, time in self._changed_at.items() if _changed_at(path) != time), None):
            return f"{changed} has changed"
        gc.disable()  # imports make nothing but what lives on, and looking through it takes a fifth of their time
        with _Outputs(output):
            try:
                for name in names:
                    importlib.import_module(name)
            except BaseException as error:  # the process that imports them for itself says it in its own words
                return f"{type(error).__name__}: {error}"
        self._note_files()
        if threads := lost_threads():
            return f"the imports have started threads that no fork would have: {', '.join(threads)}"
        gc.freeze()  # no fork looks through them again, and their memory stays shared
        gc.enable()
        return ""

    def _note_files(self) -> None:
        for module in list(sys.modules.values()):
            if (path := getattr(module, "__file__", None)) and path not in self._changed_at:
                self._changed_at[path] = _changed_at(path)

    def _become(self, asked: dict[str, Any], output: int) -> None:
        """Makes the fork what a new process of the program would be."""
        parent = os.getppid()
        os.setsid()
        die_with_parent(parent)
        self._channel.close()
        for descriptor in self._forks:
            os.close(descriptor)
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        for name in ("stdout", "stderr"):
            _reopen(name)
        os.chdir(asked["directory"])
        os.environ.update(asked["environment"])
        importlib.invalidate_caches()
        # Unlike those of `random`, these would begin in the same state in each fork.
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()
        show_as(" ".join([sys.executable, "-P", "-m", *asked["program"]]))

    def _tell_end(self, descriptor: int) -> None:
        pid = self._forks.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._send(ended=pid, code=os.waitstatus_to_exitcode(status))

    def _send(self, **message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the other end is closed, as the next look shows
            self._channel.send(json.dumps(message).encode())


class _Outputs:
    """Within the block what this process prints goes to another descriptor."""

    def __init__(self, output: int) -> None:
        self._output = output

    def __enter__(self) -> None:
        self._own = [os.dup(standard) for standard in (1, 2)]
        for standard in (1, 2):
            os.dup2(self._output, standard)

    def __exit__(self, *_error: object) -> None:
        for standard, own in zip((1, 2), self._own, strict=True):
            os.dup2(own, standard)
            os.close(own)


def _reopen(name: str) -> None:
    """Opens a standard stream anew: it remembers whether it could seek in what its descriptor was before."""
    old = getattr(sys, name)
    raw = open(old.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115 (it stays open)
    settings = {key: getattr(old, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
    stream = io.TextIOWrapper(raw, newline="\n", **settings)  # unbuffered, as -u has it
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def lost_threads() -> list[str]:
    """Names of the threads that a fork would miss. A fork that ends at once comes first: OpenBLAS ends its threads at a
    fork, and begins them again in either process as it needs them."""
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    tasks = Path("/proc/self/task")
    others = (tasks / name / "comm" for name in os.listdir(tasks) if int(name) != os.getpid())
    return [name for comm in others if (name := comm.read_text(encoding="utf-8").strip()) not in _MAY_BE_LOST]


def show_as(title: str) -> None:
    """Has `ps` show this process by a title, which gets the room of the arguments alone: whoever looks for a home's
    processes reads their environment."""
    os.environ["SPT_NOENV"] = "1"
    from setproctitle import setproctitle

    setproctitle(title)
    del os.environ["SPT_NOENV"]


def _changed_at(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def main() -> None:
    """Serves; in a fork, runs its program as `python -m` would."""
    die_with_parent()
    before_torch()
    channel = socket.socket(fileno=os.dup(0))
    channel.set_inheritable(False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    program, *arguments = ForkServer(channel).serve()
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
