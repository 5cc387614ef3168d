"""`rpg watch`: shows the live progress of runs, on the terminal or in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import ServerRecord, complete_recorded


def watch(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN-or-EXPERIMENT",
            help="Runs, experiments or NAME@VERSION with all their runs; with --web also studies.",
            autocompletion=complete_recorded("runs", "experiments", "studies"),
        ),
    ] = None,
    web: Annotated[
        bool,
        typer.Option(
            "--web", help="Overlay the runs' curves in a browser, live; without a name, those of all runs that train."
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="With --web: the address to serve at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --web: the port; 0 means 4202, or a free one if that is in use.")] = 0,
    profile: ServerRecord = "",
) -> None:
    """Shows the live progress of runs, or of all current runs of an experiment. Exits 0 if all have finished.

    With --web it prints the link of a page that overlays the runs' curves, updates them during training and shows the
    answer so far. If `rpg up` serves the record, the page is there; else it is served here until Ctrl-C.
    """
    if web:
        _in_browser(names or [], host, port, profile)
        return
    if not names:
        raise typer.BadParameter("name a run or an experiment, or give --web for all", param_hint="RUN-or-EXPERIMENT")
    from pipelines.cli.follow import watch_runs
    from pipelines.cli.reading import reading, wait_for_start
    from pipelines.home.runs import find_runs

    with reading(profile) as record:
        record.refresh(())
        wait_for_start(record, names)
        run_ids = dict.fromkeys(run_id for name in names for run_id in find_runs(record.home, name))
        if set(watch_runs(record, list(run_ids))) != {"finished"}:
            raise typer.Exit(1)


def _in_browser(names: list[str], host: str, port: int, profile: str) -> None:
    from pipelines.cli.reading import Reading, wait_for_start
    from pipelines.home.home import Home
    from pipelines.home.runs import find_run, is_study
    from pipelines.home.versions import is_experiment, runs_of
    from pipelines.web.serve import live_path, serve_here, served_live

    if profile:
        raise typer.BadParameter("open the server's own address in a browser to see its record", param_hint="--web")
    home = Home.from_environment()
    wait_for_start(Reading(home), names)
    wanted = []
    for name in names:
        if is_experiment(home, name):
            runs_of(home, name)  # refuses an unknown version
        wanted.append(name if is_study(home, name) or is_experiment(home, name) else find_run(home, name))
    if not port and (link := served_live(home, wanted)):
        typer.echo(link)
    else:
        serve_here(home, host, port, live_path(wanted))
