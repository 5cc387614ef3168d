"""`rpg export`: a run as files that need nothing of this platform."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import RunId


def export(
    run: RunId,
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
    source, inside = home.run(run_id), home.root.resolve()
    copied = [source / name for name in ("spec.json", "run.json", "state.json", "train.json", "report.html", "weights")]
    for path in [*copied, *(source / "weights").rglob("*")]:
        if not path.resolve().is_relative_to(inside):
            raise RpgError(f"{path} is a link out of {home.root}: it is not exported")
    directory.mkdir(parents=True, exist_ok=True)
    counts = export_run(home.root, run_id, directory)
    for path in copied:
        if path.is_dir():
            shutil.copytree(path, directory / path.name)
        elif path.exists():
            shutil.copy2(path, directory / path.name)
    typer.echo(f"{directory}: " + ", ".join(f"{count} {table}" for table, count in counts.items()))
