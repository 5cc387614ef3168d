"""Tools that a policy may call between its turns. `tool` defines them; `functions` has the built-in ones, one per
module.

`calls` reads the calls in the sampled text and writes the answers as tokens. The package imports the sandbox and the
schema; the rollouter of tools imports it.
"""

from rpg.tools.tool import EndingSession, Tool, ToolSession
from rpg.tools.tool_error import ToolError

__all__ = ["EndingSession", "Tool", "ToolError", "ToolSession"]
