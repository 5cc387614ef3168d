"""The verbs that read what is recorded: sql, runs, show, logs, watch."""

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.output import Format

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or a part of it that no other run shares.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command line."""
    app.command()(sql)
    app.command()(runs)
    app.command()(show)
    app.command()(logs)
    app.command()(watch)


def sql(
    query: Annotated[str | None, typer.Argument(metavar="[QUERY]", help="One statement. Without it, a prompt.")] = None,
    chosen: Annotated[
        Format | None, typer.Option("--format", help="How to write rows; FILE's suffix decides otherwise.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to FILE.")] = None,
) -> None:
    """SQL over everything recorded, while training runs too."""
    import sys

    from pipelines.cli.output import write_result
    from pipelines.cli.prompt import run_prompt
    from pipelines.home import Home
    from storage import Store

    home = Home.from_environment()
    if query is None:
        run_prompt(home, chosen or Format.table)
        return
    with Store.open(home.root) as store:
        result = store.query(query)
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    write_result(result, chosen, output)


def runs(
    experiment: Annotated[str | None, typer.Option(help="Only this experiment's runs.")] = None,
    status: Annotated[str | None, typer.Option(help="Only runs that are so, e.g. failed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Lists the runs, newest last."""
    from pipelines.cli.output import print_rows
    from pipelines.cli.show import list_runs
    from pipelines.home import Home

    columns, rows = list_runs(Home.from_environment(), experiment=experiment, status=status, plain=as_json)
    if not rows and not as_json:
        typer.echo("no runs", err=True)
        return
    print_rows(columns, rows, as_json=as_json)


def show(run: Run, as_json: AsJson = False) -> None:
    """One run whole: how it stands, what its spec says, its stages, figures, evaluations and files."""
    from pipelines.cli.output import print_json
    from pipelines.cli.show import describe_run, print_run
    from pipelines.home import Home
    from pipelines.runs import find_run

    home = Home.from_environment()
    described = describe_run(home, find_run(home, run))
    if as_json:
        print_json(described)
    else:
        print_run(described)


def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as the run writes, until it ends.")] = False,
    stage: Annotated[str | None, typer.Option(help="Only this stage's log.")] = None,
) -> None:
    """What the run's stages wrote."""
    from pipelines.cli.follow import print_logs
    from pipelines.home import Home
    from pipelines.runs import find_run

    home = Home.from_environment()
    print_logs(home, find_run(home, run), stage=stage, follow=follow)


def watch(run: Run) -> None:
    """The run's live progress, until it ends; exit code 0 if it finished."""
    from pipelines.cli.follow import watch_run
    from pipelines.home import Home
    from pipelines.runs import find_run

    home = Home.from_environment()
    if watch_run(home, find_run(home, run)) != "finished":
        raise typer.Exit(1)
