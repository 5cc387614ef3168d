"""`rpg runs`: the list of runs."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import AsJson, ServerRecord


def runs(
    experiment: Annotated[str | None, typer.Option(help="Only the runs of this experiment or study.")] = None,
    status: Annotated[str | None, typer.Option(help="Only runs that are so, e.g. failed.")] = None,
    profile: ServerRecord = "",
    as_json: AsJson = False,
) -> None:
    """Lists the runs, newest last."""
    from pipelines.cli.output import print_rows
    from pipelines.cli.reading import reading
    from pipelines.cli.show import list_runs

    with reading(profile) as record:
        record.refresh()
        columns, rows = list_runs(record.home, experiment=experiment, status=status, plain=as_json)
    if not rows and not as_json:
        typer.echo("no runs", err=True)
        return
    print_rows(columns, rows, as_json=as_json)
