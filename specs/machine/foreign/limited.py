"""Limits of memory and time for work on other people's texts and files."""

import ctypes
import math
import os
import re
import select
import signal
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specs.machine.parent import die_with_parent

_FRAME = struct.Struct("=cQ")
"""Kind and number of bytes of one message from the process."""
_ITEM, _FAILED, _DONE = b"i", b"f", b"d"
_CHUNK = 1 << 20


class LimitError(Exception):
    """Error for work that exceeded a limit or failed. `str()` gives the reason."""


@contextmanager
def limited_memory(most: int) -> Iterator[None]:
    """Limits this process, within the block, to `most` bytes more than it has now. Works only on Linux.

    An allocation beyond that raises MemoryError, or an error of the library that allocates. A lower limit of the caller
    stays.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        yield
        return
    import resource

    match = re.search(r"^VmData:\s+(\d+) kB$", status.read_text(encoding="utf-8"), re.MULTILINE)
    assert match
    before = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = {int(match[1]) * 1024 + most, *before} - {resource.RLIM_INFINITY}
    resource.setrlimit(resource.RLIMIT_DATA, (min(allowed), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def limited_seconds(seconds: float) -> Iterator[None]:
    """Interrupts Python code of this thread by a LimitError if the block takes longer than `seconds`."""
    thread, lock, over = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not over:
                _raise_in(thread)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except LimitError:
        raise LimitError(f"took longer than {seconds:g} s") from None
    finally:
        with lock:
            over = True
        timer.cancel()


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(LimitError))


def in_limited_process(
    work: Callable[[], Iterable[str]], *, seconds: float, memory: int, total: float = math.inf
) -> Iterator[str]:
    """Yields the texts that `work` yields in a fork of this process, which is killed when a limit is exceeded.

    Args:
        seconds: most that one text may take.
        memory: bytes that the fork may take beyond those of this process.
        total: most seconds that all texts may take.
    Raises:
        LimitError: a limit was exceeded, or `work` raised; the text has the exception's name and words.
    """
    reading, writing = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about other threads, which the fork does not have
        child = os.fork()
    if child == 0:
        _work(work, memory, writing, parent)
    os.close(writing)
    end = time.monotonic() + total
    try:
        while True:
            deadline, limit = min((time.monotonic() + seconds, f"{seconds:g} s"), (end, f"{total:g} s in all"))
            kind, length = _FRAME.unpack(_read(reading, _FRAME.size, deadline, limit))
            text = _read(reading, length, deadline, limit).decode("utf-8", "surrogatepass")
            if kind == _DONE:
                return
            if kind == _FAILED:
                raise LimitError(text)
            yield text
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _work(work: Callable[[], Iterable[str]], memory: int, output: int, parent: int) -> None:
    """Does the work in the fork. Does not return."""
    try:
        die_with_parent(parent)
        try:
            with limited_memory(memory):
                for text in work():
                    _send(output, _ITEM, text)
            _send(output, _DONE, "")
        except MemoryError:
            _send(output, _FAILED, f"took more than {memory >> 20} MiB of memory")
        except Exception as error:
            _send(output, _FAILED, f"{type(error).__name__}: {error}"[:500])
    finally:
        os._exit(1)


def _send(output: int, kind: bytes, text: str) -> None:
    content = text.encode("utf-8", "surrogatepass")
    left = memoryview(_FRAME.pack(kind, len(content)) + content)
    while left:
        left = left[os.write(output, left) :]


def _read(source: int, length: int, deadline: float, limit: str) -> bytes:
    parts, left = [], length
    while left:
        readable, _, _ = select.select([source], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise LimitError(f"took longer than {limit}")
        if not (part := os.read(source, min(left, _CHUNK))):
            raise LimitError("took too much memory, or crashed")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
