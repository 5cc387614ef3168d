"""Processes that may misbehave, or run what a model wrote, kept from the rest of the machine.

`start` runs a command with an environment, a session and limits of its own, and `Confined.end` ends all that came of
it. *Sealed*, it runs in bubblewrap: without a network, with no file of the machine but a runtime to read. `missing`
says why this machine can seal nothing.
"""

from rpg.sandbox.bubblewrap import missing
from rpg.sandbox.process import Confined, Limits, start

__all__ = ["Confined", "Limits", "missing", "start"]
