"""`rpg watch`: the live progress of runs."""

from __future__ import annotations

import typer

from pipelines.cli.options import RunsName


def watch(name: RunsName) -> None:
    """The live progress of a run, or of all runs that an experiment has now. Exits 0 where all have finished."""
    from pipelines.cli.follow import watch_runs
    from pipelines.home import Home
    from pipelines.runs import find_runs

    home = Home.from_environment()
    if set(watch_runs(home, find_runs(home, name))) != {"finished"}:
        raise typer.Exit(1)
