"""The keeper: supervisor inside a seal. It is a warm interpreter that forks a process for each program.

A program is the first process of a namespace: the kernel ends everything that it started together with it, even in
other sessions. It has its own /tmp, another user's identity or no capability, limits, a filter of system calls, and no
descriptor but its input and its two outputs. Input and output of programs go from pipe to file to pipe within the
kernel: they are never in the memory of the keeper, of which each program has a copy.

A frame begins with the length of a JSON text as eight bytes and that text; its `lengths` are the lengths of the parts
that follow. Run by `rpg.sandbox.room`.
"""

import ast
import atexit
import ctypes
import gc
import importlib
import io
import json
import linecache
import os
import random
import select
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from types import ModuleType
from typing import Any

from rpg.sandbox import enter

_WARM = (
    *("array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions"),
    *("functools", "heapq", "itertools", "math", "operator", "queue", "re", "statistics", "string", "typing"),
)
"""Modules that short programs often import. They are loaded once."""
_NEW_NAMESPACES = 0x20000000 | 0x00020000
"""CLONE_NEWPID and CLONE_NEWNS."""
_PIECE = 1 << 20
"""Number of bytes that are copied at once."""
_NO_SET_USER_NO_DEVICE = 2 | 4
_SCRATCH = b"size=64m,nr_inodes=4096,mode=1777"
"""Mount options of a program's own /tmp, which ends with the program."""
_FIRST_USER, _USERS = 2_000_000_000, 100_000_000
"""First user id and number of ids for programs. If the keeper is root, each program is a user of its own: the kernel
counts processes by user."""
_OF_THE_SEAL = 2
"""Processes of the seal that count with a program's if both run as one user: bubblewrap's and the keeper."""
_STACK_BYTES = 64 << 20
_PR_SET_DUMPABLE, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 4, 47, 4
_CAPABILITIES_VERSION = 0x20080522
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"}
_CLONE = {"x86_64": 56, "aarch64": 220}
_libc = ctypes.PyDLL(None, use_errno=True)


def main(filtered: str) -> None:
    """Serves requests until its input ends. `filtered` is the filter of system calls, hexadecimal."""
    sys.path.remove(os.environ["PYTHONPATH"])  # directory of this package
    for name in _WARM:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _send({"lengths": []})
    while (request := _receive()) is not None:
        serve = _serve_session if request["kind"] == "session" else _serve_program
        with ExitStack() as held:
            serve(request, bytes.fromhex(filtered), held)


def _serve_program(request: dict[str, Any], filtered: bytes, held: ExitStack) -> None:
    limits, command = request["limits"], request["command"]
    program, text = (_filled(held, length) for length in request["lengths"])

    def become() -> None:
        if request["kind"] == "python":
            _run_python(program, command)
        else:  # a binary is a file of its own, in memory
            os.execve(program if request["kind"] == "binary" else command[0], command, _ENVIRONMENT)

    begun = time.monotonic()
    child = _Child(limits, filtered, become, [text], [program], limits["cpu_seconds"], held)
    child.answer(child.watch(begun + limits["seconds"]), begun)


class _Child:
    """A confined process, the first of its namespace, with its output."""

    def __init__(
        self,
        limits: Mapping[str, Any],
        filtered: bytes,
        become: Callable[[], None],
        stdin: list[int],
        kept: list[int],
        cpu_seconds: int,
        held: ExitStack,
    ) -> None:
        """Starts the process. `kept` are descriptors that `become` needs; their numbers do not change. `held` closes
        everything that was opened."""
        self._most = limits["output_bytes"]
        outputs = [os.pipe() for _ in range(2)]
        is_ready, says_ready = os.pipe()
        self.process = _fork()
        if self.process == 0:
            try:
                _confine(limits, filtered, cpu_seconds, [*stdin, *(write for _, write in outputs)], says_ready, kept)
            except BaseException:
                traceback.print_exc()  # to the keeper's standard error
                os._exit(1)
            _end(become)
        for descriptor in (*(write for _, write in outputs), says_ready):
            os.close(descriptor)
        self._gone = _held(held, os.pidfd_open(self.process))
        # Pipe -> the file in memory that receives its data.
        self._files = {_held(held, read): _held(held, os.memfd_create("output")) for read, _ in outputs}
        self._lengths = dict.fromkeys(self._files, 0)
        self._open = set(self._files)
        held.callback(self.end)  # before its pipes are closed
        ready = os.read(is_ready, 1)
        os.close(is_ready)
        if ready != b"+":
            raise RuntimeError("a program's process could not be confined")

    def watch(self, until: float, *, or_says: int = -1) -> str:
        """Reads the process's output until it has ended, has written too much, or the time is over. Then ends it.
        Returns how it ended.

        Args:
            until: end of the time, on the monotonic clock.
            or_says: a descriptor. When a byte can be read from it, the process stays alive, and the byte, 0 or 1, is
                returned.
        """
        watched = {self._gone, or_says} - {-1}
        while True:
            left = until - time.monotonic()
            ready = select.select([*self._open, *watched], [], [], max(left, 0.0))[0]
            if self._take(ready):
                return self.end("output")
            if self._gone in ready:
                return self.end("exited")
            if left <= 0:
                return self.end("timeout")
            if or_says in ready:
                if not (said := os.read(or_says, 1)):  # closed, normally at its end
                    watched.discard(or_says)
                    continue
                while self._open and (ready := select.select([*self._open], [], [], 0)[0]):
                    if self._take(ready):
                        return self.end("output")
                return "0" if said == b"0" else "1"

    def end(self, why: str = "killed") -> str:
        """Kills the process and all its descendants, and reads the data that is still in its pipes."""
        if not self.process:
            return why
        os.kill(self.process, signal.SIGKILL)
        _, self._status, self._usage = os.wait4(self.process, 0)
        self.process = 0
        while self._open and why != "output":
            if self._take([*self._open]):
                why = "output"
        return why

    def answer(self, ended: str, begun: float) -> None:
        """Sends how the process ended, or that it still runs, and its output since the last answer."""
        found: dict[str, Any] = {"ended": ended, "seconds": time.monotonic() - begun, "alive": bool(self.process)}
        if not self.process:
            found["exit_status"] = os.waitstatus_to_exitcode(self._status)
            found["cpu_seconds"] = self._usage.ru_utime + self._usage.ru_stime
        _send({**found, "lengths": [*self._lengths.values()]})
        for pipe, length in self._lengths.items():
            file = self._files[pipe]
            os.lseek(file, 0, os.SEEK_SET)
            _move(file, 1, length)
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            self._lengths[pipe] = 0

    def _take(self, ready: list[int]) -> bool:
        """Reads from those pipes that are ready. Returns whether one of them has given too much."""
        for pipe in self._open & set(ready):
            left = self._most - self._lengths[pipe]
            if left == 0:
                if os.read(pipe, 1):
                    return True
                self._open.discard(pipe)
            elif moved := os.splice(pipe, self._files[pipe], min(left, _PIECE)):
                self._lengths[pipe] += moved
            else:
                self._open.discard(pipe)
        return False


def _fork() -> int:
    """Forks a child into new namespaces. Returns its process id; 0 in the child.

    It does not use os.fork, whose repairs in the child concern other threads, which do not exist here, and cost a
    millisecond in copies of pages.
    """
    flags = _NEW_NAMESPACES | signal.SIGCHLD
    process: int = _libc.syscall(_CLONE[os.uname().machine], flags, 0, 0, 0, 0)
    if process < 0:
        raise OSError(ctypes.get_errno(), "cannot create namespaces for a program")
    return process


def _confine(
    limits: Mapping[str, Any],
    filtered: bytes,
    cpu_seconds: int,
    standard: list[int],
    says_ready: int,
    kept: list[int],
) -> None:
    """Drops the rights of the program's process and sets its limits, before any line of the program runs."""
    if _libc.mount(b"tmpfs", b"/tmp", b"tmpfs", _NO_SET_USER_NO_DEVICE, _SCRATCH):
        raise OSError(ctypes.get_errno(), "cannot create /tmp for a program")
    os.chdir("/tmp")
    os.setsid()
    for signum in (signal.SIGTERM, signal.SIGPIPE):  # the watcher and Python ignore these
        signal.signal(signum, signal.SIG_DFL)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    begin = 3
    for descriptor in (*sorted({*kept, says_ready}), 1 << 16):
        os.closerange(begin, descriptor)
        begin = descriptor + 1
    beside = _OF_THE_SEAL
    if os.geteuid() == 0:
        beside = 0
        _become_another()
    _drop_capabilities()
    enter.limit(
        {
            "RLIMIT_AS": limits["memory_bytes"],
            "RLIMIT_NPROC": limits["processes"] + beside,
            "RLIMIT_FSIZE": limits["file_bytes"],
            "RLIMIT_NOFILE": limits["open_files"],
            "RLIMIT_CORE": 0,
            "RLIMIT_STACK": _STACK_BYTES,
            **({"RLIMIT_CPU": cpu_seconds} if cpu_seconds else {}),
        }
    )
    enter.refuse_calls(filtered)
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)
    os.write(says_ready, b"+")
    os.close(says_ready)


def _become_another() -> None:
    user = _FIRST_USER + int.from_bytes(os.urandom(4)) % _USERS
    os.setgroups([])
    for number in (user, enter.NOBODY):  # a container may not have this many users
        with suppress(OSError):
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
            return
    raise OSError("root cannot become another user")


def _drop_capabilities() -> None:
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITIES_VERSION, 0))
    if _libc.capset(header, ctypes.create_string_buffer(bytes(24))):
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")


def _end(become: Callable[[], None]) -> None:
    """Runs `become` in this process, then ends the process as an interpreter would."""
    code = 1
    try:
        become()
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        _print(error)
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of an interpreter does
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(BaseException):  # None, if the program has closed it in that way
            stream.flush()  # type: ignore[union-attr]
    os._exit(code)


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    with suppress(BaseException):
        print(end.code, file=sys.stderr)
    return 1


def _print(error: BaseException) -> None:
    """Prints the traceback, without the keeper's own lines."""
    with suppress(BaseException):
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)


def _run_python(program: int, command: list[str]) -> None:
    source = _text_of(program)
    os.close(program)
    exec(_compiled(source, "<program>"), _new_main(command).__dict__)


def _text_of(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode()


def _new_main(arguments: list[str]) -> ModuleType:
    """Returns a new module `__main__`, as in an interpreter that has just started."""
    for name in [name for name in sys.modules if name == "rpg" or name.startswith("rpg.")]:
        del sys.modules[name]
    sys.argv[:] = arguments
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8", errors="replace")
    random.seed(0)  # a program's output must depend only on its input
    module = sys.modules["__main__"] = ModuleType("__main__")
    return module


def _compiled(source: str | ast.Module, name: str) -> Any:
    if isinstance(source, str):
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return compile(source, name, "exec", dont_inherit=True)


def _serve_session(request: dict[str, Any], filtered: bytes, held: ExitStack) -> None:
    """Serves an interpreter that keeps its state, until it ends or there is no further call."""
    limits = request["limits"]
    box = _held(held, os.memfd_create("code"))
    nothing = _held(held, os.open(os.devnull, os.O_RDONLY))
    waits, starts = (_held(held, each) for each in os.pipe())
    told, tells = os.pipe()
    _held(held, told)

    def become() -> None:
        _run_calls(box, waits, tells)

    child = _Child(limits, filtered, become, [nothing], [box, waits, tells], 0, held)
    os.close(tells)
    while (call := _receive()) is not None and call["lengths"]:
        begun = time.monotonic()
        os.ftruncate(box, 0)
        os.lseek(box, 0, os.SEEK_SET)
        _move(0, box, call["lengths"][0])
        os.kill(child.process, signal.SIGCONT)
        with suppress(BrokenPipeError):
            os.write(starts, b"+")
        ended = child.watch(begun + limits["seconds"], or_says=told)
        if child.process:
            os.kill(child.process, signal.SIGSTOP)  # so that its threads do nothing between calls
        child.answer(ended, begun)
        if not child.process:
            return


def _run_calls(box: int, waits: int, tells: int) -> None:
    """Executes the code in the box each time that the process is woken, and reports the result. Runs in the session's
    interpreter."""
    module = _new_main([""])
    number = 0
    while os.read(waits, 1):
        number += 1
        result = b"1"
        try:
            _execute(_text_of(box), f"<call {number}>", module.__dict__)
            result = b"0"
        except SystemExit as end:
            result = b"1" if _exit_code(end) else b"0"
        except BaseException as error:
            _print(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(tells, result)


def _execute(source: str, name: str, names: dict[str, Any]) -> None:
    """Runs the text. The value of its last line is printed, as at a prompt."""
    code = _compiled(source, name)
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    if last is None:
        exec(code, names)
        return
    exec(_compiled(tree, name), names)
    assert isinstance(last, ast.Expr)
    value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
    if value is not None:
        print(repr(value))


def _held(held: ExitStack, descriptor: int) -> int:
    """Makes sure that the descriptor is closed at the end of the request, and returns it."""
    held.callback(os.close, descriptor)
    return descriptor


def _filled(held: ExitStack, length: int) -> int:
    """Returns a file in memory with the next bytes of the input, positioned at its beginning."""
    file = _held(held, os.memfd_create("input"))
    _move(0, file, length)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _move(source: int, target: int, length: int) -> None:
    """Copies bytes between a pipe and a file, within the kernel."""
    while length:
        moved = os.splice(source, target, min(length, _PIECE))
        if not moved:
            raise EOFError("the input ended within a frame")
        length -= moved


def _receive() -> dict[str, Any] | None:
    """Returns the head of the next frame; None at the end of the input."""
    header = _read(8)
    text = _read(int.from_bytes(header, "little")) if header else b""
    request: dict[str, Any] | None = json.loads(text) if text else None
    return request


def _read(count: int) -> bytes:
    """Returns this number of bytes, or fewer at the end of the input."""
    parts = b""
    while len(parts) < count and (part := os.read(0, count - len(parts))):
        parts += part
    return parts


def _send(answer: dict[str, Any]) -> None:
    """Writes the head of a frame."""
    text = json.dumps(answer).encode()
    view = memoryview(len(text).to_bytes(8, "little") + text)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    main(sys.argv[1])
