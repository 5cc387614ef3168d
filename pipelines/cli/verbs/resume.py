"""`rpg resume`: a run goes on from its last checkpoint, or proves that it would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import RunId

if TYPE_CHECKING:
    from pipelines.home import Home


def resume(
    run: RunId,
    prove: Annotated[
        bool, typer.Option("--prove", help="Train again from a checkpoint, aside, and compare with the record.")
    ] = False,
    steps: Annotated[
        int, typer.Option(min=0, help="With --prove: how many; 0: from the last checkpoint but one to the last.")
    ] = 0,
) -> None:
    """Goes on from the run's last checkpoint, with the spec it was started with.

    With --prove it changes nothing: steps of the run are trained again from a checkpoint in a copy, and their metrics,
    rollouts, tokens and state compared with what was recorded. Exits 1 where any bit differs, times and memory aside.
    """
    from pipelines.cli.execute import execute
    from pipelines.home import Home
    from pipelines.runs import find_run
    from pipelines.services.cancel import frozen_document

    home = Home.from_environment()
    run_id = find_run(home, run)
    if prove:
        _prove(home, run_id, steps)
        return
    execute(frozen_document(home, run_id), run_id)


def _prove(home: Home, run_id: str, steps: int) -> None:
    import sys

    from pipelines.processes.supervisor import StageError
    from pipelines.proof import prove

    try:
        proof = prove(home, run_id, steps)
    except StageError as error:
        print(f"{run_id}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    for line in proof.lines():
        print(line)
    if proof.differences:
        raise typer.Exit(1)
