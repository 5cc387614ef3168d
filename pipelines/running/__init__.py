"""Executing a run: the work of its stages, and what is told of them while they work.

`stages` does the work of each stage, without Prefect; the flow in `pipelines.prefect` calls it. `run` is what the
stages share of a run under way; the others serve one of them each. Imports planning, launchers, report, sinks and
processes; prefect, jobs, studies, exchange, the doctor and the command line import it.
"""
