"""Whatever speaks to a Prefect server: which one a command reports to, its settings, deployments and flow runs.

`outbox` is what a flow tells the server while its stages work.
"""
