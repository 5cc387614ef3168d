"""The Prefect server as our processes see it: which one a command reports to, how to talk to it, what it is to run.

Imports the launchers' free ports and processes. Parallel runs, workers, submission, services, studies, the doctor and
the command line import it.
"""
