"""Programs of `rpg up`: the Prefect server, its databases, the dashboards and the workers, under supervisord."""
