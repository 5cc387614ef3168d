"""`rpg gc`: frees artifacts without references, and expired token rows, checkpoints and verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pipelines.cli.options import AsJson, Yes

if TYPE_CHECKING:
    from pipelines.home.garbage import Artifact, SavedStates, TokenRows, Verdicts


def gc(yes: Yes = False, as_json: AsJson = False) -> None:
    """Frees artifacts that no run refers to, token rows beyond `record.keep_days`, checkpoints beyond
    `training.checkpoint.keep_days`, and judges' verdicts that no run has used for 90 days.

    Lists them and asks first.
    """
    import sys

    from pipelines.cli.output import print_rows
    from pipelines.home.garbage import (
        expired_checkpoints,
        expired_tokens,
        free_checkpoints,
        free_tokens,
        free_verdicts,
        old_verdicts,
        remove,
        unreadable_specs,
        unreferenced,
    )
    from pipelines.home.home import Home

    home = Home.from_environment()
    unused, tokens, states = unreferenced(home), expired_tokens(home), expired_checkpoints(home)
    verdicts = old_verdicts(home)
    for line in unreadable_specs(home):
        typer.echo(line, err=True)
    nothing = not (unused or tokens or states or verdicts)
    if not nothing or as_json:
        rows = [[artifact.stage, str(artifact.path), artifact.num_bytes] for artifact in unused]
        rows += [["train", str(each.path), each.num_bytes] for each in tokens]
        rows += [["train", str(each.path), each.num_bytes] for each in states]
        rows += [["", str(verdicts.path), verdicts.num_bytes]] if verdicts else []
        print_rows(["stage", "path", "bytes"], rows, as_json=as_json)
    if nothing:
        typer.echo("every artifact is in use", err=True)
        return
    total = _total(unused, tokens, states, verdicts)
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"Remove {total}?", err=True)):
        typer.echo("nothing was removed" + ("" if sys.stdin.isatty() else "; --yes removes without asking"), err=True)
        return
    removed, kept = remove(home, unused)
    said = free_verdicts(verdicts) if verdicts else None
    freed = _total(removed, free_tokens(home, tokens), free_checkpoints(states), said)
    typer.echo(f"removed {freed}" + (f"; {len(kept)} in use" if kept else ""), err=True)


def _total(
    artifacts: list[Artifact], tokens: list[TokenRows], states: list[SavedStates], verdicts: Verdicts | None
) -> str:
    said = [verdicts] if verdicts else []
    listed: list[Artifact | TokenRows | SavedStates | Verdicts] = [*artifacts, *tokens, *states, *said]
    num_artifacts, num_verdicts = len(artifacts), len(verdicts.files) if verdicts else 0
    parts = [_counted(num_artifacts, "artifact")] if num_artifacts or not (tokens or states or num_verdicts) else []
    for what, num_runs in (("token rows", len(tokens)), ("checkpoints", len(states))):
        parts += [f"the {what} of {_counted(num_runs, 'run')}"] if num_runs else []
    parts += [_counted(num_verdicts, "verdict")] if num_verdicts else []
    return f"{' and '.join(parts)}, {sum(each.num_bytes for each in listed) / 2**20:.1f} MiB"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
