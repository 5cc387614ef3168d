"""`rpg logs`: what the stages of runs wrote."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import RunsName


def logs(
    name: RunsName,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as the runs write, until they end.")] = False,
    stage: Annotated[str | None, typer.Option(help="Only this stage's log.")] = None,
) -> None:
    """What the stages of a run wrote, or those of all runs that an experiment has now."""
    from pipelines.cli.follow import print_logs
    from pipelines.home import Home
    from pipelines.runs import find_runs

    home = Home.from_environment()
    print_logs(home, find_runs(home, name), stage=stage, follow=follow)
