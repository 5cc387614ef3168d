"""`rpg down`: the end of what `rpg up` started."""

from __future__ import annotations


def down() -> None:
    """Ends what `rpg up` started: the server, the worker and optuna-dashboard; a run under way is cancelled."""
    import sys

    from pipelines.home import Home
    from pipelines.services.worker import down as stop_services

    stopped = stop_services(Home.from_environment())
    print("server and worker are down" if stopped else "nothing was up", file=sys.stderr)
