"""`rpg up`: starts a Prefect server, workers and the pages of studies and of the record on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipelines.cli.options import AsJson

if TYPE_CHECKING:
    from pipelines.prefect.server.api import Services


def up(
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the Prefect dashboard; 0: that of the last start (at first 4200), or a free one.",
        ),
    ] = 0,
    profile: Annotated[
        Literal["embedded", "server"] | None,
        typer.Option(help="embedded: SQLite, the default. server: PostgreSQL and Redis."),
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Number of workers; 0 means one.")] = 0,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground, for a unit file or a container.")
    ] = False,
    new_password: Annotated[
        bool, typer.Option("--new-password", help="Create new passwords; the old ones stop working.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Starts a Prefect server, workers, the pages of all reports and optuna-dashboard here and prints their addresses.

    They run until `rpg down`; a process that dies is restarted. optuna-dashboard shows the home's newest study or, if
    RPG_STUDIES_URL names a database, all studies in it. It changes none. If it is not installed (`pip install
    "rpg-experiments[dashboard]"`) the others start without it.

    Clients log in with the string in services/secrets/auth under RPG_HOME, which the first start creates; other
    commands of this home need no login. The string of services/secrets/reader opens read-only access: the pages of
    studies and of the record, and `--profile`. --new-password changes both strings, also while runs train: runs of this
    home continue; restart workers elsewhere with the new string. The secret by which the home's processes authenticate
    to each other (services/secrets/own) is renewed too, unless a server of the home is up.

    --profile server is for a team: PostgreSQL and Redis (from the system's packages), two processes for the API,
    and one for Prefect's background services.

    --foreground stays in the foreground. SIGTERM and Ctrl-C end all services: runs save and return to the queue. After
    `rpg down` it exits with 0, and with 1 if supervisord was killed.
    """
    import signal
    import sys

    from pipelines.home.home import Home
    from pipelines.prefect.server.api import ServiceError, renew_passwords
    from pipelines.prefect.server.credentials import login_files
    from pipelines.prefect.services.stack import Wanted, give_back, stay
    from pipelines.prefect.services.stack import up as start_services

    home, wanted = Home.from_environment(), Wanted(port, profile, workers)
    if foreground:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if new_password:
        renew_passwords(home)  # first: it takes effect even if a program does not start
    try:
        services = start_services(home, wanted, say=lambda line: print(line, file=sys.stderr))
    except ServiceError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    logins = {name: str(path) for name, path in login_files(home).items()}
    try:
        _show(services, logins, as_json=as_json)
        if foreground and not stay(home, services):
            print(f"supervisord was killed; see {home.logs / 'supervisord.log'}", file=sys.stderr)
            raise typer.Exit(1)
    except KeyboardInterrupt:
        if not foreground:
            raise
        give_back(home, services)


def _show(services: Services, logins: dict[str, str], *, as_json: bool) -> None:
    import json
    import sys

    pages = {"studies": services.studies_url or None, "record": services.record_url or None}
    if as_json:
        print(json.dumps({"dashboard": services.dashboard, "api": services.url, **pages, **logins}))
    else:
        print(services.dashboard)
        for name, address in pages.items():
            if address:
                print(f"{name}: {address}")
        print(f"log in with: {logins['password']}")
        valid = " and ".join(name for name, address in pages.items() if address)
        print(f"to read only, at {valid}: {logins['reader']}")
    sys.stdout.flush()
