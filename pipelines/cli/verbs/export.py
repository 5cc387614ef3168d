"""`rpg export`: writes a run as files that can be read without this platform."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import RunsName


def export(
    name: RunsName,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.")],
) -> None:
    """Writes a run as Parquet files, spec, weights and README, for use without this platform and for `rpg import`.

    Each run of an experiment gets its own directory in DIR.
    """
    from pipelines.exchange.export import write_export
    from pipelines.home.home import Home
    from pipelines.home.runs import find_runs, status_of
    from pipelines.home.versions import is_experiment
    from specs.machine.liveness import FINAL

    home = Home.from_environment()
    for run_id in find_runs(home, name):
        place = directory / run_id if is_experiment(home, name) else directory
        counts = write_export(home, run_id, place)
        typer.echo(f"{place}: " + ", ".join(f"{count} {table}" for table, count in counts.items()))
        if (status := status_of(home, run_id)) not in FINAL:
            typer.echo(f"{run_id} is {status}: `rpg import` accepts it only if it is exported after its end", err=True)
