"""`rpg run`, `submit`, `cancel`, `resume`: what makes work start, go on and stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pipelines.home import Home
    from pipelines.planning.plan import Plan
    from pipelines.running.experiment import RunOutcome
    from specs.loader import Document

File = Annotated[Path, typer.Argument(help="The experiment's spec file.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="path.to.field=value")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunId = Annotated[str, typer.Argument(help="The run, as `rpg runs` lists it; an unambiguous beginning is enough.")]


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command line."""
    app.command("run", short_help="Runs an experiment here; a second call reuses what is done.")(run)
    app.command("submit", short_help="Hands an experiment to a Prefect server, one flow run per run.")(submit)
    app.command("cancel", short_help="Stops a run after the step under way.")(cancel)
    app.command("resume", short_help="Goes on with a run from its last checkpoint.")(resume)


def run(file: File, overrides: Overrides = None) -> None:
    """Runs the experiment here, with progress on stderr. What is done already is reused.

    Reports to the server that `rpg up` started, else to one of its own for the call.
    """
    from specs.loader import load_document

    document = load_document(file, tuple(overrides or ()))
    _execute(document)


def resume(
    run_id: RunId,
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
    from pipelines.home import Home
    from pipelines.runs import find_run
    from pipelines.services.cancel import frozen_document

    home = Home.from_environment()
    found = find_run(home, run_id)
    if prove:
        _prove(home, found, steps)
        return
    _execute(frozen_document(home, found), found)


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


def cancel(
    run_id: RunId,
    grace: Annotated[float, typer.Option(help="Seconds after which it is stopped in the middle of a step.")] = 5.0,
) -> None:
    """Stops a run after the step under way or after --grace seconds, whichever is first."""
    import sys

    from pipelines.home import Home
    from pipelines.runs import find_run
    from pipelines.services.cancel import cancel_run

    home = Home.from_environment()
    print(cancel_run(home, find_run(home, run_id), grace), file=sys.stderr)


def submit(
    file: File,
    overrides: Overrides = None,
    profile: Annotated[
        str, typer.Option(envvar="RPG_PROFILE", help="A Prefect API's URL or a Prefect profile's name.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Hands the frozen experiment to the Prefect server of --profile, or to that of `rpg up`, and prints the links."""
    import json

    from pipelines.home import Home
    from pipelines.services.submit import submit_document
    from specs.loader import load_document

    submitted = submit_document(load_document(file, tuple(overrides or ())), Home.from_environment(), profile)
    if as_json:
        print(json.dumps([entry.as_data() for entry in submitted], indent=2))
        return
    for entry in submitted:
        print(f"{entry.run_id}  {entry.link}")


def _execute(document: Document, only: str = "") -> None:
    """Runs a document's runs, or one of them, and prints the answer. Exits 1 where one failed, 130 if interrupted."""
    import sys

    from pipelines.home import Home
    from pipelines.processes.reap import reap
    from pipelines.services.server import Api

    home = Home.from_environment()
    home.root.mkdir(parents=True, exist_ok=True)
    for orphan in reap(home):
        print(f"ended {orphan.stage} {orphan.pid}, left by a command that was killed", file=sys.stderr)
    with Api(home) as api:
        plan = _planned(document, home)
        with api.connected():
            outcomes = _run_plan(plan, home, only)
    _finish(document, outcomes, home)


def _planned(document: Document, home: Home) -> Plan:
    """The plan; its warnings go to stderr."""
    import sys

    from pipelines.planning.plan import make_plan
    from specs.errors import render

    if document.warnings:
        print(render(document.warnings, noun="warning"), file=sys.stderr)
    return make_plan(document, home)


def _run_plan(plan: Plan, home: Home, only: str) -> tuple[RunOutcome, ...]:
    from pipelines.running.experiment import execute_plan
    from pipelines.running.progress import ConsoleProgress

    return execute_plan(plan, home, only=only, progress=ConsoleProgress())


def _finish(document: Document, outcomes: tuple[RunOutcome, ...], home: Home) -> None:
    """Prints the answer, or why there is none, and exits."""
    import sys

    from pipelines.cli.answer import answer_lines, next_lines

    for outcome in outcomes:
        if outcome.error is not None:
            print(f"{outcome.run.run_id}: {outcome.error}", file=sys.stderr)
    finished = [outcome for outcome in outcomes if outcome.status == "finished"]
    answer = answer_lines(document, home) if finished else []
    for line in [*answer, *next_lines(document, outcomes)]:
        print(line)
    if any(outcome.interrupted for outcome in outcomes):
        raise typer.Exit(130)
    if len(finished) < len(outcomes):
        raise typer.Exit(1)
