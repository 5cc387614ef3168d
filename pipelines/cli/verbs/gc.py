"""`rpg gc`: frees artifacts that nothing refers to."""

from __future__ import annotations

import typer

from pipelines.cli.options import AsJson, Yes


def gc(yes: Yes = False, as_json: AsJson = False) -> None:
    """Frees artifacts that no run refers to; lists them and asks first."""
    import sys

    from pipelines.cli.output import print_rows
    from pipelines.garbage import remove, unreferenced
    from pipelines.home import Home

    home = Home.from_environment()
    unused = unreferenced(home)
    if unused or as_json:
        rows = [[artifact.stage, str(artifact.path), artifact.num_bytes] for artifact in unused]
        print_rows(["stage", "path", "bytes"], rows, as_json=as_json)
    if not unused:
        typer.echo("every artifact is in use", err=True)
        return
    total = f"{len(unused)} artifacts, {sum(artifact.num_bytes for artifact in unused) / 2**20:.1f} MiB"
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"Remove {total}?", err=True)):
        typer.echo("nothing was removed" + ("" if sys.stdin.isatty() else "; --yes removes without asking"), err=True)
        return
    removed, kept = remove(home, unused)
    freed = sum(artifact.num_bytes for artifact in removed) / 2**20
    typer.echo(
        f"removed {len(removed)} artifacts, {freed:.1f} MiB" + (f"; {len(kept)} in use" if kept else ""), err=True
    )
