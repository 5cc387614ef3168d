"""The processes that a command starts: watched, asked to stop, and ended by the next command if this one was killed.

Imports the home and the ground floor; launchers, running, prefect, jobs, studies and the command
line import it.
"""
