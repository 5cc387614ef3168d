"""`rpg logs`: what a run's stages wrote."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import RunId


def logs(
    run: RunId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as the run writes, until it ends.")] = False,
    stage: Annotated[str | None, typer.Option(help="Only this stage's log.")] = None,
) -> None:
    """What the run's stages wrote."""
    from pipelines.cli.follow import print_logs
    from pipelines.home import Home
    from pipelines.runs import find_run

    home = Home.from_environment()
    print_logs(home, find_run(home, run), stage=stage, follow=follow)
