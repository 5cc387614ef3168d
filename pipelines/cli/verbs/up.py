"""`rpg up`: a Prefect server and a worker on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import AsJson


def up(
    port: Annotated[int, typer.Option(help="Of the dashboard; 0: 4200, or a free one where that is taken.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Starts a Prefect server and a worker here and prints the dashboard's address; they run until `rpg down`."""
    import json
    import sys

    from pipelines.home import Home
    from pipelines.services.server import ServiceError
    from pipelines.services.worker import up as start_services

    try:
        services = start_services(Home.from_environment(), port)
    except ServiceError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps({"dashboard": services.dashboard, "api": services.url}))
    else:
        print(services.dashboard)
