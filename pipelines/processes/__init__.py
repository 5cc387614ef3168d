"""The processes that a command starts: watched, asked to stop, and ended by the next command if this one was killed.

Imports the home and its state alone; launchers, running and services import it.
"""
