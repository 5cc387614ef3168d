"""`rpg rm`: deletes a run or an experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pipelines.cli.options import RunsName, Yes

if TYPE_CHECKING:
    from collections.abc import Sequence

_LISTED = 10


def rm(name: RunsName, yes: Yes = False) -> None:
    """Deletes a run, or an experiment with all its runs: weights, checkpoints, rows and report.

    Lists them, names the evaluations of their weights, and asks first. Shared results stay; `rpg gc` frees those that
    no run needs any more.
    """
    import sys

    from pipelines.home.garbage import unreferenced
    from pipelines.home.home import Home
    from pipelines.home.removal import removal_of, remove

    home = Home.from_environment()
    removal = removal_of(home, name)
    for run_id in removal.runs:
        print(run_id)
    if removal.needed_by:
        typer.echo(_still_needed(removal.needed_by), err=True)
    what = _count(len(removal.runs))
    what += f" and the experiment {removal.experiment}" if removal.experiment else ""
    what += f", {removal.num_bytes / 2**20:.1f} MiB"
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"Delete {what}?", err=True)):
        typer.echo("nothing was deleted" + ("" if sys.stdin.isatty() else "; --yes deletes without asking"), err=True)
        return
    is_indexed = remove(home, removal)
    typer.echo(f"deleted {what}", err=True)
    if not is_indexed:
        typer.echo("the index could not be written; `rpg db rebuild` rebuilds it once there is room", err=True)
    if freed := unreferenced(home):
        typer.echo(f"`rpg gc` frees {len(freed)} artifacts that no run needs any more", err=True)


def _still_needed(by: Sequence[str]) -> str:
    """Returns a warning about the runs that need the deleted model."""
    lines = [
        f"{_count(len(by))} evaluated these weights or started from them; their records are kept, but the weights"
        " cannot be evaluated again:",
        *(f"  {run_id}" for run_id in by[:_LISTED]),
        *([f"  and {len(by) - _LISTED} more"] if len(by) > _LISTED else []),
    ]
    return "\n".join(lines)


def _count(runs: int) -> str:
    return f"{runs} run{'' if runs == 1 else 's'}"
