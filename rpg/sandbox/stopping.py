"""Stops all that runs in a seal between the calls of a session, and counts its CPU time.

A cgroup (version 2) does both, where this process may make one. Elsewhere each process is sent SIGSTOP, until none is
found that runs; the `filter` lets none of them be sent SIGCONT by the kernel.
"""

import os
import secrets
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

_STOP_SECONDS = 10.0
"""A process that is sent SIGSTOP stops in microseconds, unless the machine is overloaded."""
_PAUSE_SECONDS = 0.0005
_TICKS = os.sysconf("SC_CLK_TCK")
_STANDING = frozenset({b"T", b"t", b"Z", b"X"})
"""States of a thread that uses no processor, as /proc has them: stopped, traced, or ended."""


class Stopper(Protocol):
    """What stops the processes of a seal."""

    def stop(self) -> float:
        """Stops them all. Returns the CPU seconds that all processes of the seal have used since it began.

        Raises:
            TimeoutError: they go on.
            OSError: the seal has ended.
        """
        ...

    def resume(self) -> None:
        """Has them go on."""
        ...


class Cgroup:
    """A cgroup of a seal's own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._freeze, self._usage = (directory / name for name in ("cgroup.freeze", "cpu.stat"))

    @classmethod
    def made(cls) -> Self | None:
        """Returns a new one within that of this process; None where it may make none."""
        try:
            directory = _own_cgroup() / f"rpg-{os.getpid()}-{secrets.token_hex(4)}"
            directory.mkdir()
        except OSError:
            return None
        made = cls(directory)
        if made._freeze.exists() and made._usage.exists():
            return made
        made.remove()
        return None

    def is_used(self) -> bool:
        """Returns whether a process is in it."""
        with suppress(OSError):
            return bool((self.directory / "cgroup.procs").read_text())
        return False

    def remove(self) -> None:
        """Removes it, once nothing is in it."""
        with suppress(OSError):
            self.directory.rmdir()

    def stop(self) -> float:
        """See Stopper."""
        self._freeze.write_text("1")
        return int(self._usage.read_text().split()[1]) / 1e6

    def resume(self) -> None:
        """See Stopper."""
        self._freeze.write_text("0")


def _own_cgroup() -> Path:
    """Returns the directory of this process's cgroup. FileNotFoundError where no hierarchy of version 2 is mounted."""
    owns = (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    own = Path(next(owns, ""))
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        _, _, _, root, place, *_ = mount.split()
        if rest.startswith("cgroup2 ") and own.is_relative_to(root):
            return Path(place) / own.relative_to(root)
    raise FileNotFoundError("no cgroup of version 2")


@dataclass(frozen=True, slots=True)
class _Process:
    """A process as /proc has it."""

    parent: int
    states: frozenset[bytes]
    """Those of its threads."""
    children: tuple[int, ...]
    ticks: int
    """CPU time, with that of the children that it has waited for."""


class Signals:
    """Signals to the processes below one, the keeper of a seal."""

    def __init__(self, keeper: int) -> None:
        self._keeper = keeper
        self._stopped: dict[int, int] = {}
        """Number of each process that was sent SIGSTOP, and a descriptor that no later process of that number has."""
        self._ticks = self._counted = 0

    @classmethod
    def below(cls, process: int) -> Self:
        """For the keeper that came of the process, the last one in a row."""
        while children := _children(process):
            process = children[0]
        return cls(process)

    def stop(self) -> float:
        """See Stopper. It does not count a process that ended before anybody waited for it.

        A process that stands has no child that is not found. One whose parent was killed meanwhile is found at the
        second look.
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
        ticks = sum(process.ticks for process in (*found.values(), _process(self._keeper)) if process)
        self._counted += max(0, ticks - self._ticks)
        self._ticks = ticks
        return self._counted / _TICKS

    def resume(self) -> None:
        """See Stopper. The keeper itself has the first process go on."""
        for process in self._stopped.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGCONT)
            os.close(process)
        self._stopped = {}

    def _runs(self, number: int, process: _Process) -> bool:
        """Returns whether a thread of it may use the processor. One in an uninterruptible sleep stops as it wakes."""
        standing = _STANDING | {b"D"} if number in self._stopped else _STANDING
        return not process.states <= standing

    def _send_stop(self, number: int, parent: int) -> None:
        with suppress(OSError):
            known = self._stopped.get(number)
            process = os.pidfd_open(number) if known is None else known
            again = _process(number)
            if known is None and not (again and again.parent == parent):  # the number is another's by now
                os.close(process)
                return
            self._stopped[number] = process
            signal.pidfd_send_signal(process, signal.SIGSTOP)

    def _look(self) -> dict[int, _Process]:
        """Returns the processes that there are, by number. One that ends meanwhile counts as running."""
        found: dict[int, _Process] = {}
        left = list(_children(self._keeper))
        while left:
            number = left.pop()
            process = _process(number) or _Process(0, frozenset({b"R"}), (), 0)
            found[number] = process
            left += (child for child in process.children if child not in found)
        return found


def _process(number: int) -> _Process | None:
    """Returns the process; None where it has ended. Its threads are looked at before their children."""
    place = f"/proc/{number}"
    try:
        with open(f"{place}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        threads = os.listdir(f"{place}/task")
        states = [fields[0]] if len(threads) == 1 else [_state(f"{place}/task/{thread}/stat") for thread in threads]
        return _Process(int(fields[1]), frozenset(states), _children(number), sum(map(int, fields[11:15])))
    except (FileNotFoundError, ProcessLookupError):
        return None


def _state(file: str) -> bytes:
    with open(file, "rb") as opened:
        return opened.read().rpartition(b") ")[2][:1]


def _children(number: int) -> tuple[int, ...]:
    """Returns the numbers of a process's children."""
    found: list[str] = []
    for thread in os.listdir(f"/proc/{number}/task"):
        with suppress(FileNotFoundError), open(f"/proc/{number}/task/{thread}/children") as file:
            found += file.read().split()
    return tuple(map(int, found))
