"""`rpg worker`: Prefect's worker under a supervisor, the process of each flow, and what settles flows that died.

Imports running, remote, processes and server; services and the command line import it. A deployment's job command
names `flow_process`.
"""
