"""`rpg schedules`: experiments that a server submits at the times of a cron expression."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import AsJson, Profile


def schedules(
    remove: Annotated[str, typer.Option(metavar="EXPERIMENT", help="Removes this experiment's schedule.")] = "",
    profile: Profile = "",
    as_json: AsJson = False,
) -> None:
    """Lists the schedules that `rpg submit --cron` created on the server, with times in UTC, or removes one."""
    import json

    from pipelines.home.home import Home
    from pipelines.prefect.flows.schedules import list_schedules, remove_schedule

    home = Home.from_environment()
    if remove:
        remove_schedule(home, profile, remove)
        return
    entries = list_schedules(home, profile)
    if as_json:
        print(json.dumps([entry.as_data() for entry in entries], indent=2))
        return
    for entry in entries:
        print(f"{entry.experiment}  {entry.cron}  pool {entry.pool}{'' if entry.active else '  paused'}")
