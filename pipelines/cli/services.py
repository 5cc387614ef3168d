"""`rpg up`, `down`, `worker`, `doctor`: the dashboard stack on this machine, and what is the matter with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Profile = Annotated[str, typer.Option(envvar="RPG_PROFILE", help="A Prefect API's URL or a Prefect profile's name.")]


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command line."""
    app.command("up", short_help="Starts the dashboard and a worker on this machine.")(up)
    app.command("down", short_help="Ends what `rpg up` started.")(down)
    app.command("worker", short_help="Works for a pool in the foreground.")(worker)
    app.command("doctor", short_help="What is installed, reachable, misconfigured.")(doctor)


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


def down() -> None:
    """Ends the server and the worker that `rpg up` started; a run under way is cancelled."""
    import sys

    from pipelines.home import Home
    from pipelines.services.worker import down as stop_services

    stopped = stop_services(Home.from_environment())
    print("server and worker are down" if stopped else "nothing was up", file=sys.stderr)


def worker(
    pool: Annotated[str, typer.Option(help="The work pool to take flow runs from.")] = "rpg", profile: Profile = ""
) -> None:
    """Takes submitted runs from a pool and executes them here, one at a time, until it is interrupted."""
    from pipelines.home import Home
    from pipelines.services.submit import api_url
    from pipelines.services.worker import run_worker

    home = Home.from_environment()
    run_worker(home, api_url(home, profile), pool)


def doctor(
    file: Annotated[Path | None, typer.Argument(help="A spec: what its launcher reaches is looked at too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Says what is installed, reachable and misconfigured. Exits 1 where something that is needed is broken."""
    import json
    from dataclasses import asdict

    from pipelines.doctor import examine
    from pipelines.home import Home
    from specs.loader import load_experiment

    findings = examine(Home.from_environment(), load_experiment(file) if file else None)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        signs = {"ok": "ok     ", "note": "note   ", "broken": "BROKEN "}
        for finding in findings:
            print(f"{signs[finding.status]} {finding.name:<18} {finding.message}")
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)
