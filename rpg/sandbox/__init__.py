"""Sandbox for processes that may misbehave or run text of a model. It isolates them from the rest of the machine.

`Sandbox` runs untrusted programs. `room` lends them warm sandbox processes (`Seal`), in each of which a supervisor (the
`keeper`) forks one program after another. `start` runs a command with its own environment, session and limits;
`Confined.end` ends it and all its descendants. A *sealed* command runs in bubblewrap: it has no network, can read only
a runtime of the machine's files, and is under a `filter` of system calls. `missing` states why this machine cannot seal
commands, `room.missing` why it cannot run programs.
"""

from rpg.sandbox.bubblewrap import missing
from rpg.sandbox.process import SYSTEM_PATH, Confined, Limits, start, watched
from rpg.sandbox.room import Program, Sandbox, SandboxError, Session
from rpg.sandbox.seal import Outcome

__all__ = [
    "SYSTEM_PATH",
    "Confined",
    "Limits",
    "Outcome",
    "Program",
    "Sandbox",
    "SandboxError",
    "Session",
    "missing",
    "start",
    "watched",
]
