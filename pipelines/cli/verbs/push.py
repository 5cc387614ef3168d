"""`rpg push`: pushes a run's model to a Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import RunId


def push(
    run: RunId,
    to: Annotated[str, typer.Option("--to", metavar="ID", help="The Hub's name of the model, NAMESPACE/NAME.")],
    checkpoint: Annotated[
        str,
        typer.Option(metavar="STEP|best|last", help="Exported weights to push; best: those with the highest accuracy."),
    ] = "last",
    private: Annotated[
        bool, typer.Option("--private/--public", help="Visibility of the model; private by default.")
    ] = True,
    dry_run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write what would be pushed to this new directory; send nothing.")
    ] = None,
) -> None:
    """Pushes a run's model to a Hub, in one commit, with a card that holds spec, certificate, answer and lineage.

    HF_ENDPOINT names the Hub; the token is that of `hf auth login` or HF_TOKEN. A model trained as an adapter is pushed
    merged, with the adapter beside it. Exits 1 if the Hub was unreachable; it then has no part of the model, and a
    repository that was created for the push is deleted.
    """
    import sys

    from pipelines.cli.disk import size_text
    from pipelines.exchange.push import NotSentError, check_name, model_of, send
    from pipelines.home.home import Home
    from pipelines.home.runs import find_run
    from specs.errors import RpgError

    check_name(to)
    home = Home.from_environment()
    model = model_of(home, find_run(home, run), checkpoint)
    kind = "private" if private else "public"
    if dry_run is not None:
        if dry_run.exists() and (not dry_run.is_dir() or any(dry_run.iterdir())):
            raise RpgError(f"{dry_run} exists and is not an empty directory")
        dry_run.mkdir(parents=True, exist_ok=True)
        model.write(dry_run, to)
        files = [path for path in sorted(dry_run.rglob("*")) if path.is_file()]
        for path in files:
            print(f"{path.relative_to(dry_run)}  {size_text(path.stat().st_size)}")
        typer.echo(f"{dry_run}: the files that would be pushed to {to}, {kind}; nothing was sent", err=True)
        return
    try:
        pushed = send(model, to, private=private)
    except NotSentError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    print(pushed.url)
    typer.echo(f"{model.account.run.run_id}, step {model.account.step}, is {pushed.repo} now, {kind}", err=True)
