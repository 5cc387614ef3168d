"""`rpg runs`: the list of runs."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import AsJson, ServerRecord


def runs(
    experiment: Annotated[
        str | None, typer.Option(help="Only the runs of this experiment, NAME@VERSION or study.")
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(help="Only runs with this status: pending, running, finished, failed, cancelled, crashed."),
    ] = None,
    disk: Annotated[
        bool, typer.Option("--disk", help="Show the disk space of each run instead, the largest last.")
    ] = False,
    profile: ServerRecord = "",
    as_json: AsJson = False,
) -> None:
    """Lists the runs, newest last. The reward is the mean over the last ten steps."""
    from pipelines.cli.disk import disk_rows, in_words, shared_bytes, size_text
    from pipelines.cli.output import print_rows
    from pipelines.cli.reading import is_starting, print_waiting_elsewhere, reading
    from pipelines.cli.show import list_runs
    from pipelines.home.starting import starting
    from pipelines.home.versions import runs_of, split_name

    _check_status(status)
    if disk and profile:
        raise typer.BadParameter("run the command on the server's machine, which has the disk", param_hint="--disk")
    with reading(profile) as record:
        record.refresh()
        name, version = split_name(experiment or "")
        columns, rows = list_runs(record.home, experiment=name or None, status=status, plain=as_json)
        if version:
            of_version = runs_of(record.home, f"{name}@{version}")
            rows = [row for row in rows if row[0] in of_version]
        print_waiting_elsewhere(record, [row[0] for row in rows if "pending" in row])
        if disk:
            columns, rows = disk_rows(record.home, [row[0] for row in rows])
            if not as_json:
                rows = list(in_words(rows))
                typer.echo(f"results that runs share: {size_text(shared_bytes(record.home))}", err=True)
    begun = [name for name in starting(record.home) if experiment in (None, name)] if not profile else []
    for name in begun:
        typer.echo(is_starting(name), err=True)
    if not rows and not as_json:
        if begun:
            return
        which = " ".join(["no", *([status] if status else []), "runs", *([f"of {experiment}"] if experiment else [])])
        typer.echo(f"{which} in {record.home.root}", err=True)
        if not record.home.root.exists() and not record.home.another():
            typer.echo("  hint: there is no such directory; RPG_HOME names the one that holds the runs", err=True)
        return
    print_rows(columns, rows, as_json=as_json)


def _check_status(given: str | None) -> None:
    from specs.errors import RpgError
    from specs.machine.liveness import STATUSES
    from specs.schema.fields import nearest

    if given is not None and given not in STATUSES:
        lines = [f"--status {given}: no run has this status", f"  allowed: {', '.join(STATUSES)}"]
        hint = nearest(given, STATUSES)
        raise RpgError("\n".join([*lines, *([f"  hint: {hint}"] if hint else [])]))
