"""`rpg worker`: Prefect's worker under a supervisor, the process of each flow, and the reconciliation of dead flows.

A deployment's job command names `flow_process`.
"""
