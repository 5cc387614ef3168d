"""Tools of an MCP server."""

import os
import shutil
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic import Field

from rpg.tools.tool import Tool, ToolSession
from specs.errors import Issue, IssueError
from specs.machine.scripts import interpreters
from specs.schema.base import execution


class Mcp(Tool):
    """Tools of an MCP server over stdio, which starts once on each rank and ends with the run. Needs the package
    mcp."""

    several: ClassVar[bool] = True

    command: tuple[str, ...] = Field(min_length=1)
    """Program of the server, and its arguments."""
    tools: tuple[str, ...] = ()
    """Names of the server's tools that the policy may call. Empty means all."""
    environment: tuple[str, ...] = execution(())
    """Names of environment variables that the server gets, in addition to PATH, HOME and the user's name."""

    def lacks(self) -> Issue | None:
        """See ToolSection."""
        if find_spec("mcp") is None:
            hint = 'pip install "rpg-experiments[mcp]"'
            return Issue("the package mcp is not installed", ("type",), given="mcp", hint=hint)
        program = shutil.which(self.command[0])
        if program is None:
            hint = "name a program on the PATH, or by its whole path"
            return Issue("there is no such program", ("command", 0), given=self.command[0], hint=hint)
        try:
            interpreters(os.path.abspath(program), os.environ.get("PATH", os.defpath))
        except IssueError as error:
            return replace(error.issue, path=("command", 0))
        return None

    def offered(self) -> "tuple[Tool, ...]":
        """See Tool.

        Raises:
            IssueError: the server does not start, or lacks one of the named tools.
        """
        from rpg.tools.mcp_server import ServerStartError, server_of

        try:
            server = server_of(self.command, self.environment)
        except ServerStartError as error:
            raise IssueError(
                Issue("the MCP server does not start", ("command",), given=f"{' '.join(self.command)}: {error}"[:300])
            ) from None
        known = {tool.type: tool for tool in server.tools}
        lacking = [name for name in self.tools if name not in known]
        if lacking or not known:
            raise IssueError(
                Issue("the MCP server has no such tool", ("tools",), ", ".join(lacking), ", ".join(known) or "none")
            )
        return tuple(known[name] for name in self.tools or known)

    def describe(self) -> dict[str, Any]:
        """See Tool. Each of its tools describes itself."""
        raise NotImplementedError

    def open(self) -> ToolSession:
        """See Tool. Each of its tools is opened separately."""
        raise NotImplementedError
