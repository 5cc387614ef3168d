"""Executing a run: the work of its stages, and what is told of them while they work.

`stages` does the work of each stage, without Prefect; the flow in `prefect_flows` calls it. `run` is what the stages
share of a run under way; the others serve one of them each. Imports planning, launchers, report, processes and
prefect_server's outbox; prefect_flows, studies, exchange, the doctor and the command line import it.
"""
