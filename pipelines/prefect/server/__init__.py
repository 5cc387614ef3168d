"""Access to a Prefect server: which one a command reports to, its settings, deployments and flow runs.

`outbox` sends a flow's messages to the server while its stages work.
"""
