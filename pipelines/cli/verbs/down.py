"""`rpg down`: the end of what `rpg up` started."""

from __future__ import annotations


def down() -> None:
    """Ends what `rpg up` started, the databases too; a run that its worker executes is cancelled."""
    import sys

    from pipelines.home.home import Home
    from pipelines.prefect.services.stack import down as stop_services

    stopped = stop_services(Home.from_environment())
    print("what was up is down" if stopped else "nothing was up", file=sys.stderr)
