"""`rpg report`: writes one self-contained page, or serves all of them to a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import Digits, Output, Rows, SafeCsv, ServerRecord
from pipelines.cli.output import TableFormat

if TYPE_CHECKING:
    from pipelines.cli.output import Choice
    from pipelines.home.home import Home


def report(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RUN-or-EXPERIMENT",
            help="A run; an experiment, all seeds of the version run last or of NAME@VERSION; a study.",
        ),
    ] = "",
    output: Output = None,
    profile: ServerRecord = "",
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write each chart as SVG, PDF and PNG and its data as CSV instead, for a paper."
        ),
    ] = None,
    kind: Annotated[
        TableFormat | None, typer.Option("--format", help="Print the table of results instead, for a paper.")
    ] = None,
    rows: Rows = None,
    digits: Digits = None,
    safe_csv: SafeCsv = False,
    serve: Annotated[bool, typer.Option("--serve", help="Show all reports in a browser, until Ctrl-C.")] = False,
    host: Annotated[str, typer.Option(help="With --serve: the address to serve at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="With --serve: the port; 0 means 4202, or a free one if that is in use.")
    ] = 0,
) -> None:
    """Writes one self-contained HTML page with plots and prints its path.

    With --serve it shows every experiment, study and run in a table to filter and sort, each with its page, and prints
    a link to the table. Without the link, the browser asks for a password of the home, as for `rpg up`.
    """
    from pipelines.home.home import Home

    if serve and profile:
        raise typer.BadParameter("open the server's own address in a browser to see its record", param_hint="--serve")
    if serve:
        from pipelines.web.serve import serve_here

        serve_here(Home.from_environment(), host, port)
        return
    if not name:
        raise typer.BadParameter("name a run or an experiment, or give --serve for all", param_hint="RUN-or-EXPERIMENT")
    from pipelines.cli.output import Choice
    from pipelines.cli.reading import reading
    from pipelines.home.runs import is_study, study_runs
    from pipelines.home.versions import is_experiment, names_of_others
    from pipelines.report import write_experiment_report, write_run_report
    from pipelines.report.evidence import find_groups
    from pipelines.studies.answers.report import write_study_report
    from specs.records import TABLES

    with reading(profile) as record:
        record.refresh()
        home = record.home
        of_study = is_study(home, name)
        groups = [] if of_study else find_groups(home, name)
        run_ids = study_runs(home, name) if of_study else [run_id for group in groups for run_id in group.run_ids]
        record.refresh(TABLES, only=[f"runs/{run_id}" for run_id in run_ids])
        if figures is not None or kind is not None:
            _for_papers(home, name, figures, kind, Choice(rows or (), digits), is_study=of_study, safe=safe_csv)
            return
        if of_study:
            page = write_study_report(home, name, output)
        elif is_experiment(home, name):
            page = write_experiment_report(home, name, output)
            record.note_looks([name])
            if others := names_of_others(home, name):
                typer.echo(f"also run with other values: {', '.join(others)}", err=True)
        else:
            page = write_run_report(home, run_ids[0], output)
        typer.echo(page)


def _for_papers(
    home: Home,
    name: str,
    figures: Path | None,
    kind: TableFormat | None,
    choice: Choice,
    *,
    is_study: bool,
    safe: bool,
) -> None:
    from pipelines.cli.output import print_json
    from pipelines.cli.verbs.compare import result_text
    from pipelines.cli.verbs.study import print_study_table
    from pipelines.home.versions import is_experiment
    from pipelines.report.compare import compare
    from pipelines.report.evidence import find_groups
    from pipelines.report.figures import figures_of, save_figures

    if kind is not None and is_study:
        print_study_table(home, name, kind, choice, safe=safe)
    elif kind is not None:
        comparison = compare(home, [name])
        if kind is TableFormat.json:
            print_json(comparison.to_json())
        else:
            shown = TableFormat.markdown if kind is TableFormat.table else kind
            typer.echo(result_text(comparison, shown, choice, safe=safe), nl=False)
    if figures is not None:
        found = figures_of(home, find_groups(home, name), [name] if is_experiment(home, name) else [])
        if is_study:
            from pipelines.studies.answers.pictures import study_figures
            from pipelines.studies.answers.results import read_study

            found = study_figures(home, read_study(home, name)) | found
        for path in save_figures(list(found.values()), figures, safe=safe):
            typer.echo(path)
