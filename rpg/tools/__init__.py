"""Tools that a policy may call between its turns: `tool` says what one is, `functions` holds ours, one a module.

`calls` reads the calls in what was sampled, and writes the answers down as tokens. Imports the sandbox and the schema;
the rollouter of tools imports it.
"""

from rpg.tools.tool import EndingSession, Tool, ToolSession
from rpg.tools.tool_error import ToolError

__all__ = ["EndingSession", "Tool", "ToolError", "ToolSession"]
