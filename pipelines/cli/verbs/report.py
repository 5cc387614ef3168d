"""`rpg report`: one self-contained page."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import Output


def report(
    name: Annotated[
        str, typer.Argument(metavar="RUN-or-EXPERIMENT", help="A run, or an experiment with all its seeds.")
    ],
    output: Output = None,
) -> None:
    """Writes one self-contained HTML page with plots and prints where it lies."""
    from pipelines.home import Home
    from pipelines.report import write_experiment_report, write_run_report
    from pipelines.report.evidence import find_groups

    home = Home.from_environment()
    groups = find_groups(home, name)
    if (home.experiment(name) / "experiment.json").is_file():
        typer.echo(write_experiment_report(home, name, output))
    else:
        typer.echo(write_run_report(home, groups[0].run_ids[0], output))
