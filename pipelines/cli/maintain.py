"""The verbs that look after the home directory: db rebuild, db check, export, gc."""

from pathlib import Path
from typing import Annotated

import typer

db = typer.Typer(name="db", help="The DuckDB file: made again, or checked.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command line."""
    db.command()(rebuild)
    db.command()(check)
    app.add_typer(db)
    app.command()(export)
    app.command()(gc)


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


def check(as_json: AsJson = False) -> None:
    """Says what is wrong with the DuckDB file or the files it is made from; exit code 1 if anything is."""
    from pipelines.cli.output import print_json
    from pipelines.home import Home
    from storage import check as check_store

    problems = check_store(Home.from_environment().root)
    if as_json:
        print_json(problems)
    else:
        typer.echo("\n".join(problems) or "all is well")
    if problems:
        raise typer.Exit(1)


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or a part of it that no other run shares.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.")],
) -> None:
    """A run as Parquet files, spec and weights, for use without this platform."""
    import shutil

    from pipelines.home import Home
    from pipelines.runs import find_run
    from specs.errors import RpgError
    from storage.export import export_run

    home = Home.from_environment()
    run_id = find_run(home, run)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RpgError(f"{directory} exists and is not an empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    counts = export_run(home.root, run_id, directory)
    for name in ("spec.json", "run.json", "state.json", "train.json", "report.html"):
        if (home.run(run_id) / name).is_file():
            shutil.copy2(home.run(run_id) / name, directory / name)
    if (home.run(run_id) / "weights").is_dir():
        shutil.copytree(home.run(run_id) / "weights", directory / "weights")
    typer.echo(f"{directory}: " + ", ".join(f"{count} {table}" for table, count in counts.items()))


def gc(yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False, as_json: AsJson = False) -> None:
    """Frees artifacts that no run refers to; lists them and asks first."""
    import sys

    from pipelines.cli.output import print_rows
    from pipelines.garbage import remove, unreferenced
    from pipelines.home import Home

    home = Home.from_environment()
    found = unreferenced(home)
    if found or as_json:
        rows = [[artifact.stage, str(artifact.path), artifact.num_bytes] for artifact in found]
        print_rows(["stage", "path", "bytes"], rows, as_json=as_json)
    if not found:
        typer.echo("every artifact is in use", err=True)
        return
    total = f"{len(found)} artifacts, {sum(artifact.num_bytes for artifact in found) / 2**20:.1f} MiB"
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"Remove {total}?", err=True)):
        typer.echo("nothing was removed" + ("" if sys.stdin.isatty() else "; --yes removes without asking"), err=True)
        return
    removed, kept = remove(home, found)
    freed = sum(artifact.num_bytes for artifact in removed) / 2**20
    typer.echo(
        f"removed {len(removed)} artifacts, {freed:.1f} MiB" + (f"; {len(kept)} in use" if kept else ""), err=True
    )
