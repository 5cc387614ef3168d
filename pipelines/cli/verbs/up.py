"""`rpg up`: a Prefect server, a worker and the studies' dashboard on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import AsJson


def up(
    port: Annotated[int, typer.Option(help="Of the Prefect dashboard; 0: 4200, or a free one if that is taken.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Starts a Prefect server, a worker and optuna-dashboard here and prints both dashboards' addresses.

    They run until `rpg down`. optuna-dashboard shows all studies and changes none. Where it is not installed
    (`pip install "rpg-experiments[dashboard]"`) the others start without it.
    """
    import json
    import sys

    from pipelines.home import Home
    from pipelines.services.server import ServiceError
    from pipelines.services.worker import up as start_services

    try:
        services = start_services(Home.from_environment(), port, say=lambda line: print(line, file=sys.stderr))
    except ServiceError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        studies = services.studies_url or None
        print(json.dumps({"dashboard": services.dashboard, "api": services.url, "studies": studies}))
    else:
        print(services.dashboard)
        if services.studies_url:
            print(f"studies: {services.studies_url}")
