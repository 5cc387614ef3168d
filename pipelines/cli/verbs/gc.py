"""`rpg gc`: frees artifacts that nothing refers to, token rows and checkpoints whose time is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pipelines.cli.options import AsJson, Yes

if TYPE_CHECKING:
    from pipelines.home.garbage import Artifact, SavedStates, TokenRows


def gc(yes: Yes = False, as_json: AsJson = False) -> None:
    """Frees artifacts that no run refers to, token rows that `record.keep_days` keeps no longer, and checkpoints that
    `training.checkpoint.keep_days` does not.

    Lists them and asks first.
    """
    import sys

    from pipelines.cli.output import print_rows
    from pipelines.home.garbage import (
        expired_checkpoints,
        expired_tokens,
        free_checkpoints,
        free_tokens,
        remove,
        unreferenced,
    )
    from pipelines.home.home import Home

    home = Home.from_environment()
    unused, tokens, states = unreferenced(home), expired_tokens(home), expired_checkpoints(home)
    if unused or tokens or states or as_json:
        rows = [[artifact.stage, str(artifact.path), artifact.num_bytes] for artifact in unused]
        rows += [["train", str(each.path), each.num_bytes] for each in tokens]
        rows += [["train", str(each.path), each.num_bytes] for each in states]
        print_rows(["stage", "path", "bytes"], rows, as_json=as_json)
    if not unused and not tokens and not states:
        typer.echo("every artifact is in use", err=True)
        return
    total = _total(unused, tokens, states)
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"Remove {total}?", err=True)):
        typer.echo("nothing was removed" + ("" if sys.stdin.isatty() else "; --yes removes without asking"), err=True)
        return
    removed, kept = remove(home, unused)
    freed = _total(removed, free_tokens(home, tokens), free_checkpoints(states))
    typer.echo(f"removed {freed}" + (f"; {len(kept)} in use" if kept else ""), err=True)


def _total(artifacts: list[Artifact], tokens: list[TokenRows], states: list[SavedStates]) -> str:
    listed: list[Artifact | TokenRows | SavedStates] = [*artifacts, *tokens, *states]
    parts = (
        [f"{len(artifacts)} artifact{'s' if len(artifacts) != 1 else ''}"]
        if artifacts or not (tokens or states)
        else []
    )
    for what, num_runs in (("token rows", len(tokens)), ("checkpoints", len(states))):
        parts += [f"the {what} of {num_runs} run{'s' if num_runs > 1 else ''}"] if num_runs else []
    return f"{' and '.join(parts)}, {sum(each.num_bytes for each in listed) / 2**20:.1f} MiB"
