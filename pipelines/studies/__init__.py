"""Hyperparameter studies with Optuna: search space, journal, trials, the flow in a worker, and the answer's page.

Imports running, report and services; the command line alone imports it.
"""
