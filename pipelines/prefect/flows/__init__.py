"""Flows under Prefect: the flow of a run, the submission of an experiment, and the end of its runs.

`experiment` calls the flow for each run, one after another, `parallel` several at a time, a process each; `flow` calls
a task for each stage. `submit` and `schedules` hand experiments to a server, `workers` executes them. `cancel` and
`stop` request the end of runs, and only `ending` writes it, on record and on the server. Deployments name
`flow.execute_run`, `schedules.submit_scheduled` and `workers.flow_process`.
"""
