"""An interpreter in the sandbox that keeps its names over the turns of a response."""

import atexit
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field

from rpg.sandbox import Limits, Sandbox, Session
from rpg.tools.tool import Tool, ToolSession, one_text, only_text
from rpg.tools.tool_error import ToolError
from specs.schema.base import addition

_LAST_LINES = 3
"""Number of lines, at the end of an error, that the policy gets. They describe the error."""


class Python(Tool):
    """Python in the sandbox, with state that lasts over the turns of a response. Needs bubblewrap."""

    sandboxed: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    libraries: ClassVar[tuple[str, ...]] = ("python",)

    seconds: float = Field(5.0, gt=0)
    """Longest wall time of a call, in seconds. The CPU time of all processes of a response is limited too, to `seconds`
    + 1 for each of its calls; a call beyond that is refused with a reason."""
    memory_mb: int = addition(512, ge=64)
    """Address space of the interpreter, MiB."""

    def describe(self) -> dict[str, Any]:
        """Implements the method of Tool."""
        description = "Runs Python and returns what it prints, and the value of its last line. Names are kept."
        return one_text("python", description, "code", "the program to run")

    def open(self) -> ToolSession:
        """Implements the method of Tool."""
        return _Interpreter(_sandbox(self.seconds, self.memory_mb).session())


class _Interpreter:
    """A session of the sandbox as a tool."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Implements the method of ToolSession."""
        outcome = self._session.execute(only_text(arguments, "code"))
        if outcome.fine:
            return outcome.stdout.rstrip("\n")
        last = outcome.stderr.strip().splitlines()[-_LAST_LINES:]
        raise ToolError("\n".join([outcome.stdout.rstrip("\n"), *last]).strip() or outcome.ended)

    def close(self) -> None:
        """Ends the interpreter."""
        self._session.close()


@lru_cache(maxsize=8)
def _sandbox(seconds: float, memory_mb: int) -> Sandbox:
    """Returns the process's sandbox with these limits. It stays warm from one response to the next."""
    limits = Limits(
        seconds=seconds, memory_bytes=memory_mb << 20, processes=16, file_bytes=16 << 20, output_bytes=1 << 20
    )
    sandbox = Sandbox(limits)
    atexit.register(sandbox.close)
    return sandbox
