"""What `rpg up` keeps alive: the Prefect server, its databases, the dashboards and the workers, under supervisord.

Imports server, and workers to stop their flows; the doctor and the command line import it.
"""
