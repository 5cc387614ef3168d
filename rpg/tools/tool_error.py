"""The error that tells the policy why a tool does not answer."""


class ToolError(Exception):
    """Error for a call that cannot be answered. The policy gets its text."""
