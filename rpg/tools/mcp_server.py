"""An MCP server over stdio: a separate process, whose tools the policy may call."""

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from rpg.sandbox import watched
from rpg.tools.tool import Tool, ToolSession
from rpg.tools.tool_error import ToolError
from specs.documents.strict_json import half_character
from specs.machine.own_cache import library_variables

if TYPE_CHECKING:
    import mcp

_START_SECONDS = 60.0
"""Longest time in seconds that a server may take to start and list its tools."""


class ServerStartError(RuntimeError):
    """Error raised if an MCP server did not start, or did not list its tools."""


class ServerEndedError(RuntimeError):
    """Error raised if an MCP server ended while it was needed."""


class ServerTool(Tool):
    """A tool of an MCP server."""

    _server: "Server" = PrivateAttr()
    _description: str = PrivateAttr()
    _parameters: dict[str, Any] = PrivateAttr()

    @classmethod
    def of(cls, server: "Server", tool: Any) -> "ServerTool":
        """Returns the tool as the server lists it."""
        made = cls(type=tool.name)
        made._server, made._description, made._parameters = server, tool.description or "", tool.input_schema
        return made

    def describe(self) -> dict[str, Any]:
        """See Tool."""
        parameters = {"properties": {}, **self._parameters}
        function = {"name": self.type, "description": self._description, "parameters": parameters}
        return {"type": "function", "function": function}

    def open(self) -> ToolSession:
        """See Tool. State that the server keeps is shared by all responses of a rank."""
        return _Calls(self._server, self.type)


class _Calls:
    """A session of a server's tool."""

    def __init__(self, server: "Server", name: str) -> None:
        self._server, self._name = server, name
        self._lock = threading.Lock()
        self._under_way: Future[str] | None = None
        self._ended = False

    def call(self, arguments: Mapping[str, Any]) -> str:
        """See ToolSession."""
        with self._lock:
            if self._ended:
                raise ToolError("ended")
            self._under_way = self._server.begin(self._name, dict(arguments))
        try:
            return self._under_way.result()
        except CancelledError:
            raise ToolError("ended") from None

    def end(self) -> None:
        """Cancels the call in progress and notifies the server."""
        with self._lock:
            self._ended = True
            if self._under_way:
                self._under_way.cancel()

    def close(self) -> None:
        """Does nothing, because nothing is held between calls."""


class Server:
    """A server and its tools. It runs in its own thread. However this process ends, the thread, the server and
    everything that the server started end too."""

    def __init__(self, command: Sequence[str], environment: Sequence[str]) -> None:
        """Starts the server.

        Args:
            command: a program and its arguments.
            environment: names of the variables that it gets, besides PATH, HOME and the user's name.
        Raises:
            ServerStartError: it does not list its tools.
        """
        self._command, self._environment = list(command), environment
        self._loop = asyncio.new_event_loop()
        self._session: mcp.ClientSession | None = None
        started: Future[list[Any]] = Future()
        threading.Thread(target=self._run, args=(started,), name="mcp", daemon=True).start()
        try:
            listed = started.result(_START_SECONDS)
        except TimeoutError:
            raise ServerStartError(f"it does not answer within {_START_SECONDS:g} s") from None
        self.tools = tuple(ServerTool.of(self, tool) for tool in listed)

    def begin(self, name: str, arguments: dict[str, Any]) -> "Future[str]":
        """Starts a call. Its result raises ToolError if the tool reports a failure, and ServerEndedError if the server
        ends."""
        return asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._loop)

    def _run(self, started: "Future[list[Any]]") -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(started))
        except BaseException as error:  # an ExceptionGroup of the errors of the streams
            if not started.done():
                started.set_exception(ServerStartError(_first(error)))
        finally:
            self._loop.close()

    async def _serve(self, started: "Future[list[Any]]") -> None:
        import mcp
        from mcp.client.stdio import StdioServerParameters, stdio_client

        program, *arguments = watched(self._command)
        variables = {name: os.environ[name] for name in self._environment if name in os.environ}
        parameters = StdioServerParameters(command=program, args=arguments, env=library_variables() | variables)
        # A file with a descriptor, even if standard error is captured.
        with open(os.dup(2), "w", encoding="utf-8") as errors:
            async with stdio_client(parameters, errors) as streams, mcp.ClientSession(*streams) as session:
                await session.initialize()
                tools: list[Any] = []
                page = await session.list_tools()
                tools += page.tools
                while page.next_cursor:
                    page = await session.list_tools(params=mcp.types.PaginatedRequestParams(cursor=page.next_cursor))
                    tools += page.tools
                self._session = session
                started.set_result(tools)
                await asyncio.Event().wait()  # until the process ends

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        import mcp
        from mcp_types import CONNECTION_CLOSED

        assert self._session is not None
        try:
            result: Any = await self._session.call_tool(name, arguments)
        except mcp.MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise ServerEndedError(f"the MCP server {' '.join(self._command)} has ended") from None
            raise ToolError(error.error.message) from None
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if half := half_character(text):
            raise ToolError(f"the tool's answer holds {half}")
        if result.is_error:
            raise ToolError(text or "failed")
        return text


def _first(error: BaseException) -> str:
    """Returns the first cause as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@lru_cache(maxsize=16)
def server_of(command: tuple[str, ...], environment: tuple[str, ...]) -> Server:
    """Returns this process's server for the command, which is started when first needed. Raises ServerStartError if it
    does not start."""
    return Server(command, environment)
