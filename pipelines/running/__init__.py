"""Executing a plan here: an experiment's runs one after another, and the stages of a run as a Prefect flow.

`experiment` calls the flow for each run, `flow` a task for each stage, and `stages` does the work of one, without
Prefect. `parallel` executes several runs at a time, a process each. `run` is what these share of a run under way; the
others serve one of them each. Imports planning, launchers, report, processes and server; studies, submission, workers
and the command line import it.
"""
