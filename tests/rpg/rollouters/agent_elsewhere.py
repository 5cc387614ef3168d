"""Agents whose package lives in an environment of its own."""

from pathlib import Path
from typing import Any


def rollouter(python: str, program: Path, *, environment: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
    """The section of an agent that another interpreter runs, two at a time; what it returns is the answer.

    Args:
        python: that interpreter.
        environment: names of variables that the program may read.
        settings: further ones of the section.
    """
    command = {"type": "command", "command": [python, "{file}"], "file": str(program), "sealed": False}
    return {
        "type": "agent",
        "program": {**command, "environment": list(environment)},
        "template": "{% for message in messages %}{{ message.content }}{% endfor %}",
        "answer": "returned",
        "programs_at_once": 2,
        **settings,
    }
