"""Stops all processes of a seal between the calls of a session, and counts their CPU time.

A cgroup (version 2) does both, if this process may create one. Otherwise each process is sent SIGSTOP until none is
found running; the `filter` keeps processes from having the kernel send them SIGCONT.
"""

import os
import secrets
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

_STOP_SECONDS = 10.0
"""Longest time in seconds until all processes have stopped. A process stops microseconds after SIGSTOP, unless the
machine is overloaded."""
_PAUSE_SECONDS = 0.0001
_TICKS = os.sysconf("SC_CLK_TCK")
_LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")
"""Whether the kernel was built with CONFIG_PROC_CHILDREN. The kernels of distributions are. Without it only the first
process of a session is stopped, by the keeper's own SIGSTOP."""
_STANDING = frozenset({b"T", b"t", b"Z", b"X"})
"""States of a thread that uses no processor, as letters in /proc: stopped, traced, or ended."""


class Stopper(Protocol):
    """A mechanism that stops the processes of a seal."""

    def stop(self) -> float:
        """Stops all of them. Returns the CPU seconds that all processes of the seal have used since it began.

        Raises:
            TimeoutError: some keep running.
            OSError: the seal has ended.
        """
        ...

    def resume(self) -> None:
        """Lets them run again."""
        ...


class Cgroup:
    """A seal's own cgroup."""

    def __init__(self, directory: Path) -> None:
        """Takes the cgroup's directory. Raises OSError if the kernel is older than 5.2 and cannot stop a cgroup."""
        self.directory = directory
        self._usage = open(directory / "cpu.stat", "rb", buffering=0)  # noqa: SIM115 (`remove` closes them)
        self._freeze = open(directory / "cgroup.freeze", "wb", buffering=0)  # noqa: SIM115

    @classmethod
    def made(cls) -> Self | None:
        """Returns a new child of this process's cgroup; None if this process may not create one."""
        try:
            directory = _own_cgroup() / f"rpg-{os.getpid()}-{secrets.token_hex(4)}"
            directory.mkdir()
        except OSError:
            return None
        try:
            return cls(directory)
        except OSError:
            directory.rmdir()
            return None

    def is_used(self) -> bool:
        """Returns whether the cgroup contains a process."""
        with suppress(OSError):
            return bool((self.directory / "cgroup.procs").read_text(encoding="utf-8"))
        return False

    def remove(self) -> None:
        """Removes the cgroup when it has no processes."""
        for file in (self._usage, self._freeze):
            file.close()
        with suppress(OSError):
            self.directory.rmdir()

    def stop(self) -> float:
        """See Stopper."""
        self._freeze.write(b"1")
        self._usage.seek(0)
        return int(self._usage.read(64).split()[1]) / 1e6

    def resume(self) -> None:
        """See Stopper."""
        self._freeze.write(b"0")


def _own_cgroup() -> Path:
    """Returns the directory of this process's cgroup. Raises FileNotFoundError if no hierarchy of version 2 is
    mounted."""
    owns = (
        line[3:]
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        if line.startswith("0::")
    )
    own = Path(next(owns, ""))
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, rest = line.partition(" - ")
        _, _, _, root, place, *_ = mount.split()
        if rest.startswith("cgroup2 ") and own.is_relative_to(root):
            return Path(place) / own.relative_to(root)
    raise FileNotFoundError("no cgroup of version 2")


@dataclass(frozen=True, slots=True)
class _Process:
    """A process's entries in /proc."""

    parent: int
    states: frozenset[bytes]
    """States of its threads."""
    children: tuple[int, ...]
    ticks: int
    """CPU time in ticks, including that of the children that the process has waited for."""


class Signals:
    """Stop by signals to all processes below a seal's keeper."""

    def __init__(self, keeper: int) -> None:
        self._keeper = keeper
        self._stopped: dict[int, int] = {}
        """Id of each process that was sent SIGSTOP -> descriptor that refers to this process, and not to a later one
        with the same id."""
        self._ticks = self._counted = 0

    @classmethod
    def below(cls, process: int) -> Self:
        """Returns the stopper for the keeper that is the last in a chain of single children of the process."""
        while children := _children(process, process):
            process = children[0]
        return cls(process)

    def stop(self) -> float:
        """See Stopper. The CPU time of a process that has ended counts only if its parent waited for it.

        A scan finds every child of a stopped process. A process whose parent is killed during the scan is found at the
        second one.
        """
        until, before = time.monotonic() + _STOP_SECONDS, None
        while True:
            found = self._look()
            running = {number: process for number, process in found.items() if self._runs(number, process)}
            if not running and (len(found) < 2 or found.keys() == before):
                break
            if time.monotonic() > until:
                raise TimeoutError("its processes do not stop")
            for number, process in running.items():
                self._send_stop(number, process.parent)
            before = found.keys()
            time.sleep(_PAUSE_SECONDS)
        ticks = _ticks(_fields(f"/proc/{self._keeper}/stat")) + sum(process.ticks for process in found.values())
        self._counted += max(0, ticks - self._ticks)
        self._ticks = ticks
        return self._counted / _TICKS

    def resume(self) -> None:
        """See Stopper. The keeper sends SIGCONT to the first process."""
        for process in self._stopped.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGCONT)
            os.close(process)
        self._stopped = {}

    def _runs(self, number: int, process: _Process) -> bool:
        """Returns whether a thread of the process may use the processor. A thread in uninterruptible sleep does not
        count, because it stops when it wakes."""
        standing = _STANDING | {b"D"} if number in self._stopped else _STANDING
        return not process.states <= standing

    def _send_stop(self, number: int, parent: int) -> None:
        with suppress(OSError):
            known = self._stopped.get(number)
            process = os.pidfd_open(number) if known is None else known
            again = _process(number)
            if known is None and not (again and again.parent == parent):  # the id now belongs to another process
                os.close(process)
                return
            self._stopped[number] = process
            signal.pidfd_send_signal(process, signal.SIGSTOP)

    def _look(self) -> dict[int, _Process]:
        """Returns the existing processes, by id. A process that ends during the listing counts as running."""
        found: dict[int, _Process] = {}
        left = _children(self._keeper, self._keeper)  # it has no other threads
        while left:
            number = left.pop()
            process = _process(number) or _Process(0, frozenset({b"R"}), (), 0)
            found[number] = process
            left += (child for child in process.children if child not in found)
        return found


def _process(number: int) -> _Process | None:
    """Returns the process; None if it has ended. Threads are read before their children."""
    place = f"/proc/{number}"
    try:
        fields = _fields(f"{place}/stat")
        threads = [number] if fields[17] == b"1" else os.listdir(f"{place}/task")
        states = fields[:1] if len(threads) == 1 else [_fields(f"{place}/task/{each}/stat")[0] for each in threads]
        children = tuple(child for each in threads for child in _children(number, each))
        return _Process(int(fields[1]), frozenset(states), children, _ticks(fields))
    except (FileNotFoundError, ProcessLookupError):
        return None


def _ticks(fields: Sequence[bytes]) -> int:
    """Returns the CPU time of a process, including that of the children that it has waited for."""
    return sum(map(int, fields[11:15]))


def _fields(file: str) -> list[bytes]:
    """Returns the fields of a stat file of /proc, from the state on. The name before it may contain any characters."""
    return _read(file).rpartition(b") ")[2].split()


def _children(number: int, thread: int | str) -> list[int]:
    """Returns the ids of a thread's children; empty if the kernel does not list them."""
    if not _LISTS_CHILDREN:
        return []
    return [*map(int, _read(f"/proc/{number}/task/{thread}/children").split())]


def _read(file: str) -> bytes:
    """Returns a file's content. Raises FileNotFoundError or ProcessLookupError if the process has ended."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)
