"""Seals: sandbox processes with a keeper, and the keeper's answers on programs."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from rpg.sandbox.filter import program
from rpg.sandbox.process import Confined, Limits, start
from rpg.sandbox.stopping import Cgroup, Signals, Stopper

_START_SECONDS = 60.0
_GRACE_SECONDS = 10.0
"""Seconds after the time limit within which the keeper has ended a program."""
_LONGEST_HEAD = 1 << 16
_BYTES_A_SECOND = 1e6
"""Bytes a second that a keeper reads at least, even on a busy machine."""

Ending = Literal["exited", "timeout", "memory", "output", "killed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a program, or of a call of a session."""

    stdout: str
    """Text on standard output, at most `Limits.output_bytes`. Bytes that are not UTF-8 are replaced."""
    stderr: str
    """Text on standard error, limited like stdout."""
    exit_status: int
    """Exit code, or the negative number of the signal that ended the program. For a call, 1 if it raised, else 0."""
    seconds: float
    """Wall time, seconds."""
    ended: Ending
    """How the program ended. `exited`: by itself. `timeout`: at the limit of wall time or CPU time. `memory`: it
    requested more memory than allowed. `output`: it wrote more than allowed. `killed`: by a signal, such as a
    segmentation fault."""

    @property
    def fine(self) -> bool:
        """Returns whether the program ran to its end, with exit code 0."""
        return self.ended == "exited" and self.exit_status == 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A keeper's answer on a program, or on a call of a session."""

    head: dict[str, Any]
    stdout: bytes
    stderr: bytes
    cpu_seconds: int
    """Limit of CPU time, seconds."""

    @property
    def alive(self) -> bool:
        """Returns whether the session's interpreter still runs."""
        return bool(self.head["alive"])

    def outcome(self) -> Outcome:
        """Returns this answer as an outcome of a program."""
        status = int(self.head["ended"]) if self.alive else self.head["exit_status"]
        out, err = (text.decode(errors="replace") for text in (self.stdout, self.stderr))
        return Outcome(out, err, status, self.head["seconds"], self._ending(status))

    def _ending(self, status: int) -> Ending:
        if self.alive:
            return "exited"
        if self.head["ended"] != "exited":
            ended: Ending = self.head["ended"]
            return ended
        if status == -signal.SIGKILL and self.cpu_seconds and self.head["cpu_seconds"] >= self.cpu_seconds - 0.5:
            return "timeout"
        # The kernel's out-of-memory killer, or messages of interpreters and libraries; those of several processes may
        # be mixed.
        lines = self.stderr[-4096:].splitlines()
        if status == -signal.SIGKILL or (
            status and any(line.startswith(b"MemoryError") or b"bad_alloc" in line for line in lines)
        ):
            return "memory"
        return "killed" if status < 0 else "exited"


class SealError(Exception):
    """A seal has died or does not answer."""


class Seal:
    """A keeper in bubblewrap, with the pipes to it. It ends with the thread that starts it."""

    def __init__(self) -> None:
        """Starts the keeper. Raises RuntimeError if this machine cannot seal processes, SealError if the keeper does
        not start."""
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._cgroup = Cgroup.made()
        self._stopper: Stopper | None = None
        self._process: Confined = start(
            [sys.executable, "-P", "-s", "-X", "utf8", "-m", "rpg.sandbox.keeper", program(stoppable=True).hex()],
            sealed=True,
            keeps=True,
            cgroup=self._cgroup.directory if self._cgroup else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._noise,
        )
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        try:
            self._head(time.monotonic() + _START_SECONDS)
            # This process may not be allowed to move a process into the cgroup.
            is_used = self._cgroup and self._cgroup.is_used()
            self._stopper = self._cgroup if is_used else Signals.below(self._process.pid)
        except (SealError, OSError) as error:
            self.end()
            raise SealError(str(error)) from error

    def stop(self) -> float:
        """Stops all processes. Returns the CPU seconds of the seal. Raises SealError if they keep running, or the seal
        has died."""
        assert self._stopper
        try:
            return self._stopper.stop()
        except OSError as error:
            raise SealError(str(error)) from error

    def resume(self) -> None:
        """Resumes the processes. Raises SealError if the seal has died."""
        assert self._stopper
        try:
            self._stopper.resume()
        except OSError as error:
            raise SealError(str(error)) from error

    def send(self, head: dict[str, Any], *parts: bytes) -> None:
        """Writes a request. Raises SealError if the keeper does not read it."""
        text = json.dumps({**head, "lengths": [*map(len, parts)]}).encode()
        rest = memoryview(b"".join((len(text).to_bytes(8, "little"), text, *parts)))
        until = time.monotonic() + _GRACE_SECONDS + len(rest) / _BYTES_A_SECOND
        while rest:
            if not _is_ready(self._input, select.POLLOUT, until):
                raise SealError("it does not accept requests")
            try:
                rest = rest[os.write(self._input, rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise SealError(self._last_words()) from error

    def answer(self, limits: Limits) -> Answer:
        """Returns the answer to the request. Raises SealError if none comes in time, or if it is malformed."""
        until = time.monotonic() + limits.seconds + _GRACE_SECONDS
        head = self._head(until)
        if sum(head["lengths"]) > 2 * limits.output_bytes:
            raise SealError("it answers without end")
        until = time.monotonic() + _GRACE_SECONDS + sum(head["lengths"]) / _BYTES_A_SECOND
        stdout, stderr = (self._read(length, until) for length in head["lengths"])
        return Answer(head, stdout, stderr, limits.cpu_limit)

    def end(self) -> None:
        """Ends the seal with its processes."""
        self._process.end()
        stopper, self._stopper = self._stopper, None
        with suppress(OSError):  # the cgroup is already removed
            if stopper:
                stopper.resume()
        if self._cgroup:
            self._cgroup.remove()
        self._noise.close()

    def _head(self, until: float) -> dict[str, Any]:
        length = int.from_bytes(self._read(8, until), "little")
        if length > _LONGEST_HEAD:
            raise SealError("it answers without end")
        head: dict[str, Any] = json.loads(self._read(length, until))
        return head

    def _read(self, count: int, until: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            if not _is_ready(self._output, select.POLLIN, until):
                raise SealError("it does not answer")
            part = os.read(self._output, min(count - len(parts), 1 << 20))
            if not part:
                raise SealError(self._last_words())
            parts += part
        return bytes(parts)

    def _last_words(self) -> str:
        self._noise.seek(0)
        lines = self._noise.read().decode(errors="replace").strip().splitlines()
        return f"its keeper died: {lines[-1]}" if lines else "its keeper died"


def _is_ready(descriptor: int, event: int, until: float) -> bool:
    """Returns whether the pipe becomes ready before the time is over. Uses poll, because a trainer has more descriptors
    than `select` supports.
    """
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))
