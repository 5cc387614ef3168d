"""Work under Prefect: the flow of a run, how an experiment gets there, and how its runs end.

`experiment` calls the flow for each run, one after another, `parallel` several at a time, a process each; `flow` calls
a task for each stage. `submit` and `schedules` hand experiments to a server, `workers` takes them from there. `cancel`
and `stop` ask for the end of runs, and `ending` alone writes it, on record and on the server. Deployments name
`flow.execute_run`, `schedules.submit_scheduled` and `workers.flow_process`.
"""
