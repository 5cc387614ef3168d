"""`rpg rm`: deletes a run or an experiment."""

from __future__ import annotations

import typer

from pipelines.cli.options import RunsName, Yes


def rm(name: RunsName, yes: Yes = False) -> None:
    """Deletes a run, or an experiment with all its runs: weights, checkpoints, rows and report.

    Lists them and asks first. Results that runs share stay; `rpg gc` frees those that none needs any more.
    """
    import sys

    from pipelines.garbage import unreferenced
    from pipelines.home import Home
    from pipelines.removal import removal_of, remove

    home = Home.from_environment()
    removal = removal_of(home, name)
    for run_id in removal.runs:
        print(run_id)
    what = f"{len(removal.runs)} run{'' if len(removal.runs) == 1 else 's'}"
    what += f" and the experiment {removal.experiment}" if removal.experiment else ""
    what += f", {removal.num_bytes / 2**20:.1f} MiB"
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"Delete {what}?", err=True)):
        typer.echo("nothing was deleted" + ("" if sys.stdin.isatty() else "; --yes deletes without asking"), err=True)
        return
    remove(home, removal)
    typer.echo(f"deleted {what}", err=True)
    if freed := unreferenced(home):
        typer.echo(f"`rpg gc` frees {len(freed)} artifacts that no run needs any more", err=True)
