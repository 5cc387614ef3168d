"""The end of the verbs that run a document on this machine: the answer on stdout, and the exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pipelines.home.home import Home
    from pipelines.prefect.flows.experiment import RunOutcome
    from specs.loader import Document


def execute(document: Document, only: str = "", *, parallel: str = "1", as_json: bool = False) -> None:
    """Runs a document's runs, or one of them, and prints the answer. Exits 1 if one failed, 130 if interrupted.

    Args:
        only: a run's id.
        parallel: number of concurrent runs; auto: as many as this machine's free slots allow.
        as_json: print the answer as JSON.
    """
    from pipelines.home.home import Home
    from pipelines.jobs.execute import run_here

    home = Home.from_environment()
    outcomes = run_here(document, home, only, parallel=parallel, own_process=True)
    _finish(document, outcomes, home, bool(only), as_json)


def _finish(
    document: Document,
    outcomes: tuple[RunOutcome, ...],
    home: Home,
    single: bool,
    as_json: bool,
) -> None:
    """Prints the answer, or why it is missing, and exits. `single`: only one run of the experiment was executed."""
    import sys

    from pipelines.cli.answer import answer_data, answer_lines, next_lines
    from pipelines.cli.output import print_json

    for outcome in outcomes:
        if outcome.error is not None:
            print(f"{outcome.run.run_id}: {outcome.error}", file=sys.stderr)
    finished = [outcome for outcome in outcomes if outcome.status == "finished"]
    if as_json:
        print_json(answer_data(document, outcomes, home))
    else:
        answer = answer_lines(document, home) if finished else []
        for line in [*answer, *next_lines(document, outcomes, single=single)]:
            print(line)
    if any(outcome.interrupted for outcome in outcomes):
        raise typer.Exit(130)
    if len(finished) < len(outcomes):
        raise typer.Exit(1)
