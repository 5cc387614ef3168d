"""`rpg db`: the DuckDB file made again, or checked."""

from __future__ import annotations

import typer

from pipelines.cli.options import AsJson

group = typer.Typer(help="The DuckDB file: made again, or checked.", no_args_is_help=True)


@group.command()
def rebuild() -> None:
    """Makes the DuckDB file again from the run directories; queries go on meanwhile."""
    from pipelines.home import Home
    from storage import rebuild as rebuild_store

    done = rebuild_store(Home.from_environment().root)
    for line in done.skipped:
        typer.echo(f"skipped {line}", err=True)
    typer.echo(
        f"{done.segments} segments, {done.rows} rows" + (f", {len(done.skipped)} skipped" if done.skipped else "")
    )


@group.command()
def check(as_json: AsJson = False) -> None:
    """Says what is wrong with the DuckDB file, the files it is made from or published results; exit code 1 if anything
    is. Reads every file."""
    from pipelines.cli.output import print_json
    from pipelines.home import Home
    from pipelines.results import check_results
    from storage import check as check_store

    home = Home.from_environment()
    defects = [*check_store(home.root), *check_results(home)]
    if as_json:
        print_json(defects)
    else:
        typer.echo("\n".join(defects) or "all is well")
    if defects:
        raise typer.Exit(1)
