"""Tools: functions that the policy may call, each with a description for its prompt."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

from rpg.tools.function_calls import FunctionCalls
from rpg.tools.tool_error import ToolError
from specs.schema.base import execution
from specs.schema.rollout import ToolSection


class ToolSession(Protocol):
    """A tool in use by one response."""

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Returns the answer to a call.

        Raises:
            ToolError: the call is wrong; the policy gets the text as the answer.
        """
        ...

    def close(self) -> None:
        """Ends the session at the end of the response."""
        ...


@runtime_checkable
class EndingSession(ToolSession, Protocol):
    """A session whose calls can be ended from outside."""

    def end(self) -> None:
        """Ends the call in progress and any later one. It is called from another thread than the call's."""
        ...


class Tool(ToolSection):
    """A tool; see `ToolSection` for its options."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns name, description and parameters as a JSON Schema, in the form that chat templates read."""

    @abstractmethod
    def open(self) -> ToolSession:
        """Returns a session for one response. It may be called in any thread. A session gets one call at a time."""

    def offered(self) -> "tuple[Tool, ...]":
        """Returns the tools that this section provides: the tool itself, or the tools of a server.

        Raises:
            IssueError: the section provides none. The issue's path begins at the section.
        """
        return (self,)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Returns the names of the parameters, in order."""
        return tuple(self.describe()["function"]["parameters"]["properties"])


class FunctionTool(Tool):
    """A plain function with types and a docstring, as an installed package offers it. It is called in a process of its
    own, which is ended if the answer takes too long."""

    function: ClassVar[Callable[..., Any]]

    environment: tuple[str, ...] = execution(())
    """Names of environment variables that the function may read, in addition to those of its user's home and
    languages."""

    def describe(self) -> dict[str, Any]:
        """See Tool. Transformers reads the function's types and docstring."""
        from transformers.utils.chat_template_utils import get_json_schema

        schema: dict[str, Any] = get_json_schema(type(self).function)
        return {**schema, "function": {**schema["function"], "name": self.type}}

    def open(self) -> ToolSession:
        """See Tool. The session keeps nothing from call to call."""
        return FunctionCalls(type(self).function, self.environment)


def one_text(name: str, description: str, parameter: str, meaning: str) -> dict[str, Any]:
    """Returns the description of a tool that takes one text."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string", "description": meaning}},
                "required": [parameter],
            },
        },
    }


def only_text(arguments: Mapping[str, Any], parameter: str) -> str:
    """Returns the argument of such a tool.

    Raises:
        ToolError: the arguments are not exactly this one, or it is not a text.
    """
    value = arguments.get(parameter)
    if set(arguments) != {parameter} or not isinstance(value, str):
        raise ToolError(f"takes one argument, {parameter}, a text")
    return value
