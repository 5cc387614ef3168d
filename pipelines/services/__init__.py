"""Prefect's side: the server that `rpg up` starts, workers, submission and cancelling.

Imports planning, running and processes; the command line and submitted studies import it.
"""
