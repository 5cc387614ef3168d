"""Sandbox for programs, which run one after another in warm seals. Safe to call from any thread."""

import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal, Self

from rpg.sandbox.bubblewrap import Missing
from rpg.sandbox.bubblewrap import missing as missing_seal
from rpg.sandbox.process import Limits
from rpg.sandbox.seal import Answer, Outcome, Seal, SealError

_COMPILERS = {"c++": "g++ -O2 -std=c++17 -w -x c++", "c": "gcc -O2 -std=c17 -w -x c"}
_COMPILING = Limits(seconds=60.0, memory_bytes=4 << 30, processes=16, file_bytes=64 << 20, output_bytes=32 << 20)
_START_SECONDS = 60.0
_TRIES = 3
_PAUSE_SECONDS = 0.5
_MOST_BUILT = 64
"""Largest number of compiled programs that are kept. A program is run once for each of its tests."""

Language = Literal["python", "c++", "c"]


class SandboxError(RuntimeError):
    """Error raised if the sandbox itself failed, also when retried. It is not the program's fault."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program's text, input and arguments."""

    source: str
    """Text of the program."""
    stdin: str = ""
    """Text on standard input."""
    argv: tuple[str, ...] = ()
    """Arguments, without the program's own name."""
    language: Language = "python"
    """Language of the program. A program in a language other than Python is compiled once, in the sandbox."""


class Sandbox:
    """Sandbox that runs untrusted programs, several at a time. A context manager; safe to call from any thread.

    Each program has its own processes, /tmp, limits and filter of system calls. It can read Python and the system's
    libraries and nothing else of the machine, and is ended with all its descendants. It has no network and no variable
    of this process.
    """

    def __init__(self, limits: Limits, *, at_once: int = 0) -> None:
        """Stores the limits. Does not start a process yet.

        Args:
            limits: limits of each program, and of each call of a session.
            at_once: most programs that run at a time, without sessions; 0 means as many as this process has cores.
        """
        self._limits = limits
        self._running = threading.Semaphore(at_once or cores())
        self._idle: list[Seal] = []
        self._built: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()
        # A seal ends with the thread that started it.
        self._starter = ThreadPoolExecutor(1, "sandbox")

    def run(self, program: Program) -> Outcome:
        """Runs the program. Its faults are recorded in the outcome.

        Raises:
            SandboxError: the sandbox itself failed, three times in a row.
            ValueError: this machine has no compiler for the language.
        """
        command = ["program", *program.argv]
        stdin = _encoded(program.stdin)
        with self._running:
            if program.language == "python":
                return self._ask("python", command, self._limits, _encoded(program.source), stdin).outcome()
            built = self._build(program)
            if isinstance(built, Outcome):
                return built
            return self._ask("binary", command, self._limits, built, stdin).outcome()

    def session(self) -> "Session":
        """Returns a Python interpreter that keeps its state from call to call."""
        return Session(self)

    def close(self) -> None:
        """Ends all seals, with the programs in them."""
        with self._lock:
            idle, self._idle = self._idle, []
        for seal in idle:
            seal.end()
        self._starter.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self, program: Program) -> bytes | Outcome:
        """Returns the compiled program, or the compiler's output if it failed."""
        key = (program.language, program.source)
        with self._lock:
            if key in self._built:
                self._built.move_to_end(key)
                return self._built[key]
        if not has_compiler(program.language):
            name = _COMPILERS[program.language].split()[0]
            raise ValueError(f"no {program.language} compiler on this machine: {name} is not in /usr/bin")
        command = ["/bin/sh", "-c", f"{_COMPILERS[program.language]} - -o program && cat program"]
        answer = self._ask("command", command, _COMPILING, b"", _encoded(program.source))
        outcome = answer.outcome()
        if not outcome.fine:
            return replace(outcome, stdout="")
        with self._lock:
            self._built[key] = answer.stdout
            while len(self._built) > _MOST_BUILT:
                self._built.popitem(last=False)
        return answer.stdout

    def _ask(self, kind: str, command: list[str], limits: Limits, *parts: bytes) -> Answer:
        """Returns the answer of a seal. A seal that fails is ended, and another one is asked. Raises SandboxError if
        none answers."""
        head = {"kind": kind, "command": command, "limits": {**asdict(limits), "cpu_seconds": limits.cpu_limit}}
        for rest in reversed(range(_TRIES)):
            try:
                with self.lent() as seal:
                    seal.send(head, *parts)
                    return seal.answer(limits)
            except SealError as error:
                if not rest:
                    raise SandboxError(f"the sandbox failed {_TRIES} times in a row: {error}") from error
                time.sleep(_PAUSE_SECONDS)
        raise AssertionError

    @contextmanager
    def lent(self) -> Iterator[Seal]:
        """Yields a seal for one program or one session; ends the seal if that fails."""
        with self._lock:
            seal = self._idle.pop() if self._idle else None
        if seal is None:
            if lack := missing_seal():
                raise SandboxError(f"{lack.reason}: {lack.hint}")
            seal = self._starter.submit(Seal).result()
        try:
            yield seal
        except BaseException:
            seal.end()
            raise
        with self._lock:
            self._idle.append(seal)

    @property
    def limits(self) -> Limits:
        """Returns the limits of each program."""
        return self._limits


class Session:
    """A Python interpreter that keeps its state between calls, made by `Sandbox.session`. For one thread at a time."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._lent: Any = None
        self._seal: Seal | None = None
        self._calls = 0
        self._cpu_seconds = self._cpu_of_seal = 0.0

    def execute(self, code: str) -> Outcome:
        """Runs the code with the names that earlier calls defined, and prints the value of its last expression.

        If a call has to be ended, the interpreter ends with it, and the next call starts without names. Between calls
        nothing of the session runs. If the session's processes have used more CPU time than `Limits.cpu_limit` for each
        call so far, a call is not run; its outcome reports that.

        Raises:
            SandboxError: the sandbox itself failed; the state is lost.
        """
        self._calls += 1
        most = self._sandbox.limits.cpu_limit
        if self._cpu_seconds > self._calls * most:
            used = f"the processes of this session have used {self._cpu_seconds:.0f} s of CPU time"
            said = f"{used}, and may use {most} s a call: this call was not run"
            return Outcome("", said, 1, 0.0, "timeout")
        try:
            if self._seal is None:
                self._lent = self._sandbox.lent()
                self._seal = self._lent.__enter__()
                self._cpu_of_seal = self._seal.stop()
                self._seal.resume()
                self._seal.send({"kind": "session", "limits": asdict(self._sandbox.limits)})
            self._seal.resume()
            self._seal.send({}, _encoded(code))
            answer = self._seal.answer(self._sandbox.limits)
        except SealError as error:
            self._give_back(error)
            raise SandboxError(f"the sandbox failed: {error}") from error
        self._stop(answer.alive)
        return answer.outcome()

    def _stop(self, alive: bool) -> None:
        """Stops the session until its next call. Gives the seal back if the session cannot be stopped, or has ended."""
        assert self._seal
        try:
            used = self._seal.stop()
        except SealError as error:
            self._give_back(error)
            return
        self._cpu_seconds += used - self._cpu_of_seal
        self._cpu_of_seal = used
        if not alive:
            self._give_back(None)

    def close(self) -> None:
        """Ends the interpreter."""
        if self._seal is None:
            return
        try:
            self._seal.resume()
            self._seal.send({})
        except SealError as error:
            self._give_back(error)
        else:
            self._give_back(None)

    def _give_back(self, error: Exception | None) -> None:
        lent, seal, self._lent, self._seal = self._lent, self._seal, None, None
        if lent is None:
            return
        if seal and not error:
            try:
                seal.resume()
            except SealError as failed:
                error = failed
        with suppress(SealError):
            lent.__exit__(type(error) if error else None, error, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@lru_cache(maxsize=1)
def missing() -> Missing | None:
    """Returns the obstacle that keeps this machine from running programs; None if there is no obstacle. Tested once a
    process."""
    if lack := missing_seal():
        return lack
    try:
        with Sandbox(Limits(seconds=_START_SECONDS), at_once=1) as sandbox:
            outcome = sandbox.run(Program("print(6 * 7)"))
    except SandboxError as error:
        return Missing(str(error), "allow bubblewrap's processes namespaces of their own; see docs/own-reward.md")
    return None if outcome.stdout == "42\n" else Missing(f"a program ended: {outcome}"[:500], "see docs/own-reward.md")


def has_compiler(language: Language) -> bool:
    """Returns whether programs in the language can be run here."""
    return language == "python" or shutil.which(_COMPILERS[language].split()[0], path="/usr/bin:/bin") is not None


def cores() -> int:
    """Returns this process's share of the machine's cores, which it shares with the other ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")
