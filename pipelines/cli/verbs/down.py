"""`rpg down`: the end of what `rpg up` started."""

from __future__ import annotations

from typing import Annotated

import typer


def down(
    systemd: Annotated[bool, typer.Option("--systemd", help="Remove the unit too: nothing starts at boot.")] = False,
) -> None:
    """Ends what `rpg up` started, the databases too; a run that its worker executes is cancelled.

    What `rpg up --systemd` has set up starts again at the next boot, or by `rpg up`.
    """
    import sys

    from pipelines.home.home import Home
    from pipelines.prefect.server.api import ServiceError
    from pipelines.prefect.services.stack import down as stop_services
    from pipelines.prefect.services.systemd import Unit

    unit = Unit(Home.from_environment())
    try:
        stopped = stop_services(unit.home)
        if systemd:
            unit.remove()
    except ServiceError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    later = f"; {unit.path} starts it at the next boot: `rpg down --systemd`" if unit.is_installed else ""
    print(("what was up is down" if stopped else "nothing was up") + later, file=sys.stderr)
