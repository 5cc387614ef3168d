"""Access to a Prefect server: the server that a command reports to, its settings, deployments and flow runs.

`outbox` sends a flow's messages to the server while its stages work.
"""
