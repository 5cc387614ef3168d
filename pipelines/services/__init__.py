"""Prefect's side: the services that `rpg up` starts, workers and what they run, submitting and cancelling;
and the processes of `rpg run --parallel`, which report to it.

Imports planning, running, launchers and processes; the command line, the doctor and submitted studies import it.
"""
