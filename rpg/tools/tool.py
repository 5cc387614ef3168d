"""A tool: a function that the policy may call, with a description for its prompt."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

from rpg.tools.function_calls import FunctionCalls
from rpg.tools.tool_error import ToolError
from specs.schema.base import execution
from specs.schema.rollout import ToolSection


class ToolSession(Protocol):
    """A tool as one response calls it."""

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The answer to a call.

        Raises:
            ToolError: the call is wrong; the policy is told why.
        """
        ...

    def close(self) -> None:
        """Ends it, with the response."""
        ...


@runtime_checkable
class EndingSession(ToolSession, Protocol):
    """A session whose calls can be ended."""

    def end(self) -> None:
        """Ends the call that is under way, and any later one. Called from another thread than the call's."""
        ...


class Tool(ToolSection):
    """A tool; see `ToolSection` for its options."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Name, description and parameters, as a JSON Schema of the kind that chat templates take."""

    @abstractmethod
    def open(self) -> ToolSession:
        """The tool for one response. Called in any thread; calls of one session come one at a time."""

    def offered(self) -> "tuple[Tool, ...]":
        """Tools that the policy may call by it: itself, or those of a server.

        Raises:
            IssueError: there are none. The path begins at the section.
        """
        return (self,)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(self.describe()["function"]["parameters"]["properties"])


class FunctionTool(Tool):
    """A plain function with types and a docstring, as an installed package offers it. It is called in a process of its
    own, which is ended where the answer takes too long."""

    function: ClassVar[Callable[..., Any]]

    environment: tuple[str, ...] = execution(())
    """Names of environment variables that the function may read, beside those of its user's home and languages."""

    def describe(self) -> dict[str, Any]:
        """See Tool. Types and docstring are read by transformers."""
        from transformers.utils.chat_template_utils import get_json_schema

        schema: dict[str, Any] = get_json_schema(type(self).function)
        return {**schema, "function": {**schema["function"], "name": self.type}}

    def open(self) -> ToolSession:
        """See Tool. Nothing is kept from call to call."""
        return FunctionCalls(type(self).function, self.environment)


def one_text(name: str, description: str, parameter: str, meaning: str) -> dict[str, Any]:
    """The description of a tool that takes one text."""
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
    """The argument of such a tool.

    Raises:
        ToolError: there is another argument, none, or one that is no text.
    """
    value = arguments.get(parameter)
    if set(arguments) != {parameter} or not isinstance(value, str):
        raise ToolError(f"takes one argument, {parameter}, a text")
    return value
