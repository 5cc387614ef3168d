"""`rpg down`: ends the services that `rpg up` started."""

from __future__ import annotations


def down() -> None:
    """Ends the services that `rpg up` started, including databases, and cancels the run that its worker executes."""
    import sys

    from pipelines.home.home import Home
    from pipelines.prefect.services.stack import down as stop_services

    stopped = stop_services(Home.from_environment())
    print("the services have stopped" if stopped else "no services were running", file=sys.stderr)
