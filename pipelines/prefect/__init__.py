"""Everything that uses Prefect: `server` calls its API, `flows` has the flows that it runs, `services` the programs of
`rpg up`.

Imports running, planning, launchers, report, sinks and packages below them; studies, jobs, the web application, the
doctor and the command line import it.
"""
