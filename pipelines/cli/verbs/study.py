"""`rpg study run`, `submit`, `show`, `report`, `list`, `best`: hyperparameter studies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, assert_never

import typer

from pipelines.cli.options import AsJson, Digits, Output, Overrides, Pool, Profile, Rows, SafeCsv, StudyFile
from pipelines.cli.output import TableFormat
from pipelines.cli.words import Verbs

if TYPE_CHECKING:
    from pipelines.cli.output import Choice
    from pipelines.home.home import Home
    from pipelines.studies.answers.results import StudyRecord

Name = Annotated[str, typer.Argument(metavar="FILE-or-NAME", help="The study's file, or its name.")]

group = typer.Typer(cls=Verbs, help="Hyperparameter studies: every trial is an experiment.", no_args_is_help=True)


@group.command()
def run(
    file: StudyFile,
    overrides: Overrides = None,
    parallel: Annotated[
        int,
        typer.Option(
            "--parallel", metavar="N", min=0, help="Number of concurrent trials; 0 means the study's `parallel`."
        ),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Runs the missing trials, then the confirmation runs; a repeated call continues where it stopped.

    Calls in several shells share the work.
    """
    from pipelines.cli.output import print_json
    from pipelines.home.home import Home
    from pipelines.jobs.execute import run_study_here
    from pipelines.studies.trials import StudyInterruptedError
    from specs.loader import load_study_document

    home = Home.from_environment()
    try:
        data = run_study_here(load_study_document(file, overrides or ()), home, parallel, own_process=True)
    except StudyInterruptedError:
        typer.echo("stopped; the same command continues from here", err=True)
        raise typer.Exit(130) from None
    from pipelines.studies.answers.answer import answer
    from pipelines.studies.answers.report import write_study_report
    from pipelines.studies.answers.results import StudyRecord

    record = StudyRecord.of(data)
    page = write_study_report(home, record.name)
    if as_json:
        print_json(data)
    else:
        typer.echo(answer(home, record).sentence)
        _say_next(record)
        typer.echo(f"report: {page}")
    if not record.finished or (record.status != "finished" and record.num_ended < record.trials_wanted):
        raise typer.Exit(1)


@group.command()
def submit(
    file: StudyFile,
    overrides: Overrides = None,
    parallel: Annotated[
        int,
        typer.Option(
            "--parallel",
            metavar="N",
            min=0,
            help="Number of flow runs that share the study; 0 means the study's `parallel`.",
        ),
    ] = 0,
    pool: Pool = "",
    profile: Profile = "",
) -> None:
    """Submits the frozen study to the Prefect server of --profile, or the one `rpg up` started, and
    prints its links."""
    from pipelines.home.home import Home
    from pipelines.jobs.submit import submit_study
    from specs.loader import load_study_document

    document, home = load_study_document(file, overrides or ()), Home.from_environment()
    for link in submit_study(document, home, profile, workers=parallel, pool=pool):
        typer.echo(link)


@group.command()
def cancel(
    name: Name,
    grace: Annotated[
        float, typer.Option(help="Seconds that running work has to save its state before it is killed.")
    ] = 5.0,
    profile: Annotated[
        str,
        typer.Option(help="Cancel on a server, including other users' runs: a Prefect API's URL or a profile's name."),
    ] = "",
) -> None:
    """Stops a study, wherever its workers are and even before it starts. Training saves its state, and the next run or
    submission continues the study. Exits 1 if the study did not stop."""
    from pipelines.home.home import Home
    from pipelines.prefect.flows.stop import NotStoppedError
    from pipelines.studies.workers import cancel_study

    try:
        typer.echo(cancel_study(Home.from_environment(), _name(name), grace, profile), err=True)
    except NotStoppedError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None


@group.command()
def show(name: Name) -> None:
    """Shows a study on one screen: its answer so far, and a table of the arms on fresh seeds, or of the trials if no
    arm has run yet."""
    from pipelines.cli.output import print_table
    from pipelines.home.home import Home
    from pipelines.studies.answers.answer import answer
    from pipelines.studies.answers.report import results_table
    from pipelines.studies.answers.results import read_study

    home = Home.from_environment()
    record = read_study(home, _name(name))
    found = answer(home, record)
    typer.echo(f"{record.name}: {record.status}, trials {_counts(record)}, {record.goal}")
    typer.echo(" ".join(filter(None, (found.sentence, found.note))))
    columns, rows = results_table(record, found)
    if rows:
        typer.echo()
        print_table(columns, rows)
    _say_next(record)


def _say_next(record: StudyRecord) -> None:
    """Prints the command that writes the best spec, if there is one."""
    from pipelines.studies.answers.results import best_of, pareto_front

    has_best = best_of(record) is not None
    front = [] if has_best or len(record.goals) == 1 else pareto_front(record)
    if has_best or front:
        which = f" --trial {front[0].number}" if front else ""
        typer.echo(f"\n  rpg study best {record.name}{which} -o {record.name}-best.yaml\n")


@group.command()
def report(
    name: Name,
    output: Output = None,
    kind: Annotated[
        TableFormat | None, typer.Option("--format", help="Print the table of results instead, for a paper.")
    ] = None,
    rows: Rows = None,
    digits: Digits = None,
    safe_csv: SafeCsv = False,
) -> None:
    """Writes the study's page: history, importances, slices, the best values; prints its path.

    With --format it prints the arms on fresh seeds with their intervals, or the trials until there are such arms.
    """
    from pipelines.cli.output import Choice
    from pipelines.home.home import Home
    from pipelines.studies.answers.report import write_study_report

    if kind is not None:
        choice = Choice(rows or (), digits)
        print_study_table(Home.from_environment(), _name(name), kind, choice, safe=safe_csv)
        return
    typer.echo(write_study_report(Home.from_environment(), _name(name), output))


def print_study_table(home: Home, name: str, kind: TableFormat, choice: Choice, *, safe: bool) -> None:
    """Prints a study's results, also for `rpg report`; `safe` as for `csv_text`."""
    from pipelines.cli.output import as_objects, print_json, print_table, table_for_papers
    from pipelines.studies.answers.report import study_table

    columns, every = study_table(home, name, choice.digits)
    rows = choice.of_table(every)
    match kind:
        case TableFormat.json:
            print_json(as_objects(columns, rows))
        case TableFormat.table:
            print_table(columns, rows)
        case TableFormat.latex | TableFormat.markdown | TableFormat.html | TableFormat.csv:
            typer.echo(table_for_papers(columns, rows, kind, safe=safe), nl=False)
        case _:
            assert_never(kind)


@group.command()
def best(
    name: Name,
    trial: Annotated[
        int | None, typer.Option("--trial", metavar="N", help="Number of a trial to use instead of the best.")
    ] = None,
    output: Output = None,
) -> None:
    """Prints the best spec as YAML, ready for `rpg run`: the best one confirmed on fresh seeds, else
    the best candidate."""
    from pipelines.home.home import Home
    from pipelines.studies.answers.best import best_spec
    from pipelines.studies.answers.results import read_study
    from specs.machine.files import replacing

    home = Home.from_environment()
    spec = best_spec(home, read_study(home, _name(name)), trial)
    for warning in spec.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if output is None:
        typer.echo(spec.text, nl=False)
        return
    with replacing(output, durable=False) as aside:
        aside.write_text(spec.text, encoding="utf-8")
    typer.echo(output)


@group.command("list")
def list_studies(as_json: AsJson = False) -> None:
    """Lists the studies: their progress, their cost, and the best value, a candidate or confirmed."""
    from pipelines.cli.output import print_json
    from pipelines.home.home import Home
    from pipelines.studies.answers.results import StudyRecord
    from pipelines.terminal.console import SafeConsole

    home = Home.from_environment()
    records = _records(home)
    if as_json:
        print_json(records)
        return
    import sys

    from rich.table import Table

    columns = ("study", "status", "trials", "goal", "best", "", "spent")
    table = Table(*columns, box=None, pad_edge=False)
    for record in records:
        table.add_row(*_row(home, StudyRecord.of(record)))
    # A pipe has no width to fit into.
    console = SafeConsole(soft_wrap=True, width=None if sys.stdout.isatty() else 10_000)
    console.print(table if records else "no studies yet")


def _records(home: Home) -> list[dict[str, Any]]:
    from specs.machine.files import read_json

    return [record for path in sorted(home.root.glob("studies/*/study.json")) if (record := read_json(path))]


def _row(home: Home, record: StudyRecord) -> tuple[str, ...]:
    from pipelines.studies.answers.answer import standing, study_best
    from pipelines.studies.answers.results import cost_words, pareto_front

    value, ground = "-", ""
    if best := study_best(home, record):
        who = "baseline" if best.baseline else f"trial {best.trial}"
        value, ground = f"{best.value:.4f}", f"{standing(home, record, best)}: {who}"
    elif len(record.goals) > 1 and (front := pareto_front(record)):
        ground = f"Pareto front: trials {', '.join(str(trial.number) for trial in front)}"
    return record.name, record.status, _counts(record), record.goal, value, ground, cost_words(**record.spent)


def _counts(record: StudyRecord) -> str:
    """Returns how many of the trials have ended, by ending."""
    others = [f"{number} {state}" for state in ("pruned", "failed", "cancelled") if (number := record.count(state))]
    return ", ".join([f"{record.num_ended}/{record.trials_wanted}", *others])


def _name(name: str) -> str:
    """Returns a study's name, given the name or the study's file."""
    if name.endswith((".yaml", ".yml")):
        from specs.loader import load_study

        return load_study(name).name
    return name
