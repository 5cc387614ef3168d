"""Hyperparameter studies with Optuna: search space, journal, trials, the flow in a worker, and the answer's page.

Imports prefect, running and report; the web application and the command line import it.
"""
