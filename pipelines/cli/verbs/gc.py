"""`rpg gc`: frees artifacts that nothing refers to, and token rows whose time is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pipelines.cli.options import AsJson, Yes

if TYPE_CHECKING:
    from pipelines.garbage import Artifact, TokenRows


def gc(yes: Yes = False, as_json: AsJson = False) -> None:
    """Frees artifacts that no run refers to, and token rows that `record.keep_days` keeps no longer.

    Lists them and asks first.
    """
    import sys

    from pipelines.cli.output import print_rows
    from pipelines.garbage import expired_tokens, free_tokens, remove, unreferenced
    from pipelines.home import Home

    home = Home.from_environment()
    unused, expired = unreferenced(home), expired_tokens(home)
    if unused or expired or as_json:
        rows = [[artifact.stage, str(artifact.path), artifact.num_bytes] for artifact in unused]
        rows += [["train", str(tokens.path), tokens.num_bytes] for tokens in expired]
        print_rows(["stage", "path", "bytes"], rows, as_json=as_json)
    if not unused and not expired:
        typer.echo("every artifact is in use", err=True)
        return
    total = _total(unused, expired)
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"Remove {total}?", err=True)):
        typer.echo("nothing was removed" + ("" if sys.stdin.isatty() else "; --yes removes without asking"), err=True)
        return
    removed, kept = remove(home, unused)
    freed = free_tokens(home, expired)
    typer.echo(f"removed {_total(removed, freed)}" + (f"; {len(kept)} in use" if kept else ""), err=True)


def _total(artifacts: list[Artifact], tokens: list[TokenRows]) -> str:
    sizes = [artifact.num_bytes for artifact in artifacts] + [rows.num_bytes for rows in tokens]
    parts = [f"{len(artifacts)} artifacts"] if artifacts or not tokens else []
    parts += [f"the token rows of {len(tokens)} run{'s' if len(tokens) > 1 else ''}"] if tokens else []
    return f"{' and '.join(parts)}, {sum(sizes) / 2**20:.1f} MiB"
