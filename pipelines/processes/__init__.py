"""The processes that a command starts: their supervision, requests to stop them, and the removal of processes that a
killed command has left.

Imports the home and the ground floor; launchers, running, prefect, jobs, studies and the command
line import it.
"""
