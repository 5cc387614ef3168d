"""`rpg db`: rebuilds or checks the DuckDB file, and merges segments."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import AsJson

group = typer.Typer(help="Rebuild, check and compact the record's database.", no_args_is_help=True)


@group.command()
def rebuild() -> None:
    """Rebuilds the DuckDB file from the run directories; queries work meanwhile."""
    from pipelines.home.home import Home
    from storage import rebuild as rebuild_store

    done = rebuild_store(Home.from_environment().root)
    for line in done.skipped:
        typer.echo(f"skipped {line}", err=True)
    typer.echo(f"{done.segments} segments" + (f", {len(done.skipped)} skipped" if done.skipped else ""))


@group.command()
def compact(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="None: all.")] = None,
) -> None:
    """Merges the segments of runs that have ended into one file per table and run, so that queries open few files.

    Runs do this themselves at their end; this command does it for killed runs, and frees merged segments at once.
    """
    from pipelines.home.home import Home
    from pipelines.home.runs import find_runs
    from storage import compact as compact_store

    home = Home.from_environment()
    run_ids = [run_id for name in runs or () for run_id in find_runs(home, name)]
    done = compact_store(home.root, run_ids, keep_seconds=0.0)
    for line in done.skipped:
        typer.echo(f"skipped {line}", err=True)
    typer.echo(f"{done.merged} segments were merged")


@group.command()
def check(
    full: Annotated[bool, typer.Option(help="Read every file, not only changed ones.")] = False,
    as_json: AsJson = False,
) -> None:
    """Reports damage to the DuckDB file, its source files or published results, and how it affects answers. Exit code 1
    if anything is damaged."""
    from pipelines.cli.output import print_json
    from pipelines.home.home import Home
    from pipelines.home.results import check_results
    from storage import check as check_store

    home = Home.from_environment()
    defects = [*check_store(home.root, full=full), *check_results(home, full=full)]
    if as_json:
        print_json(defects)
    else:
        typer.echo("\n".join(defects) or "all is well")
    if defects:
        raise typer.Exit(1)
