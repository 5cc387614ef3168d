"""`rpg resume`: resumes a run from its last checkpoint, or proves that this works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import RunsName

if TYPE_CHECKING:
    from pipelines.home.home import Home
    from specs.document import Document


def resume(
    name: RunsName,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="In a copy of the run, train again from a checkpoint, and compare the result with the record.",
        ),
    ] = False,
    steps: Annotated[
        int,
        typer.Option(
            min=0, help="With --prove: number of steps; 0 means from the second to last checkpoint to the last."
        ),
    ] = 0,
) -> None:
    """Resumes a run from its last checkpoint, with the spec that it was started with.

    For an experiment it resumes the unfinished runs that no process executes, one after another.

    With --prove it changes nothing: a copy of the run trains some steps again from a checkpoint, and their metrics,
    rollouts, tokens and state are compared with the record. Exits 1 if any bit differs, except in times and memory.
    """
    import sys

    from pipelines.cli.execute import execute
    from pipelines.home.home import Home
    from pipelines.home.runs import find_run, find_runs, status_of
    from pipelines.prefect.flows.cancel import frozen_document

    home = Home.from_environment()
    if prove:
        _prove(home, find_run(home, name), steps)
        return
    run_ids = find_runs(home, name)
    if len(run_ids) == 1:
        if status_of(home, run_ids[0]) == "finished":
            print(f"{run_ids[0]} is finished", file=sys.stderr)
            _propose_more_steps(home, name, run_ids[0])
        execute(frozen_document(home, run_ids[0], experiment=name), run_ids[0])
    else:
        _resume_experiment(home, name, run_ids)


def _resume_experiment(home: Home, name: str, run_ids: list[str]) -> None:
    """Resumes the runs that have not finished and that no process executes. Exits with the code of the last run that
    fails."""
    import sys

    from pipelines.cli.execute import execute
    from pipelines.home.runs import status_of
    from pipelines.prefect.flows.cancel import frozen_document

    statuses = {run_id: status_of(home, run_id) for run_id in run_ids}
    is_open = "running" not in statuses.values() and {*statuses.values()} != {"finished"}
    if is_open and (document := _document_of_all(home, name, run_ids)):
        execute(document)
        return
    code = 0
    for run_id, status in statuses.items():
        if status in ("finished", "running"):
            print(f"{run_id} is {status}", file=sys.stderr)
            continue
        try:
            execute(frozen_document(home, run_id, experiment=name), run_id)
        except typer.Exit as ended:
            code = ended.exit_code
            if code == 130:
                break
    if {*statuses.values()} == {"finished"}:
        _propose_more_steps(home, name, run_ids[0])
    if code:
        raise typer.Exit(code)


def _propose_more_steps(home: Home, name: str, run_id: str) -> None:
    """Prints on stderr how to train a finished run for more steps; nothing if its spec is not on record."""
    import sys
    from contextlib import suppress

    from pipelines.cli.answer import more_steps
    from pipelines.prefect.flows.cancel import frozen_document
    from specs.errors import SpecError

    with suppress(SpecError):
        document = frozen_document(home, run_id, experiment=name)
        if document.experiment.trains and (more := more_steps(document)):
            print(f"  hint: {more[1]}: `{more[0]}`", file=sys.stderr)


def _document_of_all(home: Home, name: str, run_ids: list[str]) -> Document | None:
    """Returns the document that all these runs were last executed from, if its present plan has exactly these runs. One
    command with one answer can then resume them. None for an earlier version, because resuming would make it the
    current one."""
    from pipelines.planning.plan import make_plan
    from pipelines.prefect.flows.cancel import frozen_document
    from specs.errors import SpecError

    if "@" in name:
        return None
    try:
        documents = [frozen_document(home, run_id, experiment=name) for run_id in run_ids]
        if any(document.to_json() != documents[0].to_json() for document in documents):
            return None
        planned = {run.run_id for run in make_plan(documents[0], home).runs}
    except SpecError:  # each run's own resumption reports its errors
        return None
    return documents[0] if planned == {*run_ids} else None


def _prove(home: Home, run_id: str, steps: int) -> None:
    import sys

    from pipelines.jobs.proof import prove
    from pipelines.processes.supervisor import StageError

    try:
        proof = prove(home, run_id, steps)
    except StageError as error:
        print(f"{run_id}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    for line in proof.lines():
        print(line)
    if proof.differences:
        raise typer.Exit(1)
