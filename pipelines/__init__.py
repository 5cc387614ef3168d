"""When it happens: plans, flows, services, studies, answers and the command line.

Imports the other three packages, Prefect and Optuna; nothing imports it.
"""
