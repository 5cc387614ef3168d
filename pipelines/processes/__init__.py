"""The processes that a command starts: watched, asked to stop, and ended by the next command if this one was killed.

Imports the home, storage's liveness and rpg's processes; launchers, running, services, studies, the proof and the
command line import it.
"""
