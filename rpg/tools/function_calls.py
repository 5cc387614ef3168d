"""Calls of a plain function in its own process, so that a call that takes too long can be ended."""

import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any

from rpg.sandbox import Confined, Limits, start
from rpg.tools.tool_error import ToolError
from specs.documents.strict_json import parse_json

_LIMITS = Limits(memory_bytes=1 << 40, processes=0, file_bytes=1 << 40, open_files=4096)
"""Limits of the process. The function is the user's own code and has all rights of the user."""


class FunctionCalls:
    """A session of a function. Each call takes an idle process or a new one, and gives it back afterwards."""

    def __init__(self, function: Callable[..., Any], environment: tuple[str, ...]) -> None:
        self._processes = _processes(function.__module__, function.__qualname__, environment)
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._ended = False

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Returns the answer to a call. If the function raises, the policy gets the error as the answer."""
        with self._lock:
            if self._ended:
                raise ToolError("ended")
            process = self._process = self._processes.take()
        try:
            answer = process.ask(arguments)
        finally:
            with self._lock:
                self._process = None
                self._processes.give_back(process)
        if error := answer.get("error"):
            raise ToolError(error)
        return str(answer["answer"])

    def end(self) -> None:
        """Ends the process of the call in progress."""
        with self._lock:
            self._ended = True
            if self._process:
                self._process.end()

    def close(self) -> None:
        """Does nothing, because nothing is held between calls."""


class _Process:
    """A process that calls one function, one call at a time."""

    def __init__(self, confined: Confined, about: dict[str, Any]) -> None:
        self._confined = confined
        self.lost = False
        self._send(about)

    def ask(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Returns the function's answer, or its error. Raises ToolError if the process is gone."""
        try:
            self._send(dict(arguments))
            line = self._confined.stdout.readline()
        except (OSError, ValueError):  # it was ended in the meantime
            line = b""
        if not line:
            self.end()
            raise ToolError("the tool's process has ended")
        try:
            answer: dict[str, str] = parse_json(line)
        except ValueError as error:
            raise ToolError(f"the tool's answer cannot be read: {error}") from None
        return answer

    def end(self) -> None:
        """Ends the process and everything that it started."""
        self.lost = True
        self._confined.end()

    def _send(self, content: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # it has ended: its output ends too
            self._confined.stdin.write(json.dumps(content).encode() + b"\n")
            self._confined.stdin.flush()


class _Processes:
    """The idle processes of a function. They are kept for the next response, and end with this process."""

    def __init__(self, module: str, name: str, environment: tuple[str, ...]) -> None:
        self._about = {"path": sys.path, "module": module, "name": name}
        self._environment = environment
        self._idle: list[_Process] = []
        # A process ends with the thread that started it.
        self._starter = ThreadPoolExecutor(1, "tool processes")
        atexit.register(self.close)

    def take(self) -> _Process:
        """Returns an idle process, or a new one."""
        with suppress(IndexError):
            return self._idle.pop()
        return self._starter.submit(self._start).result()

    def give_back(self, process: _Process) -> None:
        """Keeps the process for the next call, unless it has ended."""
        if not process.lost:
            self._idle.append(process)

    def close(self) -> None:
        """Ends the idle processes."""
        while self._idle:
            self._idle.pop().end()
        self._starter.shutdown()

    def _start(self) -> _Process:
        command = [sys.executable, "-P", "-m", "rpg.tools.function_worker"]
        confined = start(
            command,
            sealed=False,
            limits=_LIMITS,
            variables=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return _Process(confined, self._about)


@lru_cache(maxsize=64)
def _processes(module: str, name: str, environment: tuple[str, ...]) -> _Processes:
    return _Processes(module, name, environment)
