"""The error by which a tool tells the policy why it does not answer."""


class ToolError(Exception):
    """A call that cannot be answered. The policy is told the text."""
