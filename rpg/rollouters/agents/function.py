"""An agent's program that is a function in a user's own Python file."""

import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from rpg.rollouters.agent import AgentProgram, Called
from rpg.types import Problem
from specs.errors import Issue
from specs.schema.base import names_path

_loads = threading.Lock()


class Function(AgentProgram):
    """A function of a Python file: `solve(problem, base_url, api_key)` returns a text or nothing. The file is loaded
    once, and the function runs in a thread of the sampling process, so that a response does not start an interpreter.
    It is not in the sandbox and has the run's rights."""

    file: str = names_path("file")
    """Path of the file, relative to the spec. Its content is part of the fingerprint; it can import only installed
    packages."""
    function: str = Field("solve", pattern=r"^[^\W\d]\w*$")
    """The function's name."""

    def lacks(self) -> Issue | None:
        """See ProgramSection. Loads the file."""
        try:
            functions = self._functions()
        except Exception as error:  # any error that the file raises
            given = f"{type(error).__name__}: {error}"[:500]
            hint = "install its imports in the run's environment"
            return Issue("the file cannot be loaded", ("file",), given, hint=hint)
        if inspect.iscoroutinefunction(functions.get(self.function)):
            hint = "write it with def, and call async code with asyncio.run"
            return Issue("the function is async, which is not supported", ("function",), self.function, hint=hint)
        if self.function in functions:
            return None
        allowed = ", ".join(functions) or "the file has no function"
        return Issue("the file has no such function", ("function",), self.function, allowed)

    def begin(self, problem: Problem, base_url: str, api_key: str) -> Called:
        """See AgentProgram."""
        return Called(self._functions()[self.function], (problem, base_url, api_key))

    def _functions(self) -> dict[str, Callable[..., Any]]:
        with _loads:  # otherwise threads that load it at once would each load it
            return _functions_of(str(Path(self.file).resolve()))


@cache
def _functions_of(file: str) -> dict[str, Callable[..., Any]]:
    """Returns the functions of a file, by name."""
    spec = importlib.util.spec_from_file_location(file, file)
    if spec is None or spec.loader is None:
        raise ImportError("its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file] = module  # dataclasses and pickle look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[file]
        if isinstance(error, SystemExit):
            raise ImportError(f"it ends the process as it is loaded: SystemExit: {error}") from error
        raise
    return {name: value for name, value in vars(module).items() if callable(value) and not isinstance(value, type)}
