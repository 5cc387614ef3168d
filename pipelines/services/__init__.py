"""Programs of `rpg up`: the Prefect server, its databases, the dashboards and the workers, under supervisord.

Imports prefect_server, and prefect_flows to stop what workers execute; the doctor and the command line import it.
"""
