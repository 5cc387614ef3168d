"""Prefect's side: the services that `rpg up` starts, workers and what they run, submitting and cancelling.

Imports planning, running, launchers and processes; the command line, the doctor and submitted studies import it.
"""
