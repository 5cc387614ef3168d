"""`rpg up`: a Prefect server, workers and the pages of studies and of the record on this machine."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pipelines.cli.options import AsJson


def up(
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Of the Prefect dashboard; 0: the last one, at first 4200, or a free one."),
    ] = 0,
    profile: Annotated[
        Literal["embedded", "server"] | None,
        typer.Option(help="embedded: SQLite, the default. server: PostgreSQL, Redis, a page of all reports."),
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="How many; 0: one.")] = 0,
    systemd: Annotated[bool, typer.Option("--systemd", help="As a unit that starts at boot.")] = False,
    new_password: Annotated[
        bool, typer.Option("--new-password", help="Give people new passwords; the former ones open nothing any more.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Starts a Prefect server, workers and optuna-dashboard here and prints the addresses of the dashboards.

    They run until `rpg down`; what dies is started again. optuna-dashboard shows all studies and changes none. Where it
    is not installed (`pip install "rpg-experiments[dashboard]"`) the others start without it.

    Who asks logs in with the string that is made at the first start in services/secrets/auth under RPG_HOME; other
    commands of this home need none. That of services/secrets/reader opens what only shows: the pages of studies and of
    the record, and `--profile`. --new-password changes both while runs train: those of this home go on as they are,
    workers elsewhere are started again with the new one. What the home's processes show each other
    (services/secrets/own) stays while any server of the home is up; where none is, it is new too.

    --profile server is for a team: PostgreSQL and Redis (from the system's packages), two processes for the API, one
    for Prefect's background services, a page of all reports.

    --systemd writes a unit that starts the same at each boot, at the same address: of the machine where root calls,
    else of the user's own manager. From then on `rpg up` starts that unit, and `rpg down --systemd` removes it. Where
    no manager answers, the commands are printed that enable the unit.
    """
    import json
    import sys

    from pipelines.home.home import Home
    from pipelines.prefect.server.api import ServiceError, renew_passwords
    from pipelines.prefect.server.credentials import login_files
    from pipelines.prefect.services.at_boot import install
    from pipelines.prefect.services.stack import Wanted
    from pipelines.prefect.services.stack import up as start_services
    from pipelines.prefect.services.systemd import Unit

    home, wanted = Home.from_environment(), Wanted(port, profile, workers)
    unit = Unit(home)
    is_unit = systemd or (unit.is_installed and unit.is_managed())
    if new_password:
        renew_passwords(home)  # first: it takes effect where a program does not come up, too
    try:
        services = (install if is_unit else start_services)(home, wanted, say=lambda line: print(line, file=sys.stderr))
    except ServiceError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    logins = {name: str(path) for name, path in login_files(home).items()}
    if services is None:
        print("no systemd answers here; what enables the unit and starts it:", file=sys.stderr)
        commands = unit.commands
        print(json.dumps({"unit": str(unit.path), "commands": commands}) if as_json else "\n".join(commands))
        return
    for command in unit.until_log_in if is_unit else []:
        print(f"it ends with your last session, and starts at your next; to start at boot: {command}", file=sys.stderr)
    pages = {"studies": services.studies_url or None, "record": services.record_url or None}
    if as_json:
        print(json.dumps({"dashboard": services.dashboard, "api": services.url, **pages, **logins}))
        return
    print(services.dashboard)
    for name, address in pages.items():
        if address:
            print(f"{name}: {address}")
    print(f"log in with: {logins['password']}")
    print(f"to read only: {logins['reader']}")
