"""Execution of a run: the work of its stages, and the reports of their progress.

`stages` does the work of each stage, without Prefect; the flow in `pipelines.prefect` calls it. `run` has the state
that the stages of a run share; each other module serves one of them. Imports planning, launchers, report, sinks and
processes; prefect, jobs, studies, exchange, the doctor and the command line import it.
"""
