"""`rpg worker`: Prefect's worker under a supervisor, the process of each flow, and what settles flows that died.

A deployment's job command names `flow_process`.
"""
