"""The processes that a command starts: their supervision, requests to stop them, and the end of those that a killed
command has left.

Imports the home and the ground floor; launchers, running, prefect, jobs, studies and the command
line import it.
"""
