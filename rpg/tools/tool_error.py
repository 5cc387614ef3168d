"""The error that tells the policy why a tool gives no answer."""


class ToolError(Exception):
    """A call that cannot be answered. The policy gets the text."""
