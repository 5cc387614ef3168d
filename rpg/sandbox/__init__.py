"""Processes that may misbehave, or run what a model wrote, kept from the rest of the machine.

`Sandbox` runs programs that nobody trusts: `room` lends them seals, in which a `keeper` forks one after another.
`start` runs a command with an environment, a session and limits of its own, and `Confined.end` ends all that came of
it. *Sealed*, it runs in bubblewrap: without a network, with no file of the machine but a runtime to read, and with a
`filter` of system calls. `missing` says why this machine can seal nothing, `room.missing` why it can run no program.
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
