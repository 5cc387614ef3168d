"""Doing a plan: an experiment's runs, a run's stages as a Prefect flow, artifacts, leases, retries and progress.

Imports planning, launchers, report and processes; studies, services and the command line import it.
"""
