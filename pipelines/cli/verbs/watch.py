"""`rpg watch`: a run's live progress."""

from __future__ import annotations

import typer

from pipelines.cli.options import RunId


def watch(run: RunId) -> None:
    """The run's live progress, until it ends; exit code 0 if it finished."""
    from pipelines.cli.follow import watch_run
    from pipelines.home import Home
    from pipelines.runs import find_run

    home = Home.from_environment()
    if watch_run(home, find_run(home, run)) != "finished":
        raise typer.Exit(1)
