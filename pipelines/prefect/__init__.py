"""Work with Prefect: `server` speaks to its API, `flows` runs under it, `services` are the programs of `rpg up`.

Imports running, planning, launchers, report, sinks and what is below them; studies, jobs, the web application, the
doctor and the command line import it.
"""
