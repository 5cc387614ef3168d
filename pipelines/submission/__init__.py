"""Experiments in the hands of a Prefect server's workers: submitted now or at set times, noticed of, cancelled.

Imports server, running, planning and launchers; studies, proofs and the command line import it. The deployment of
schedules names `schedules.submit_scheduled`.
"""
