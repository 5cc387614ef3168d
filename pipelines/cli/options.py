"""Arguments and options that several verbs share."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

ExperimentFile = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment's spec file.")]
StudyFile = Annotated[Path, typer.Argument(metavar="FILE", help="The study's file.")]
SpecFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="The spec file of an experiment, a study or an evaluation.")
]


def complete_recorded(*folders: str) -> Callable[[str], list[str]]:
    """Returns a completer of the names that the home records in these folders."""

    def complete(incomplete: str) -> list[str]:
        from pipelines.home.home import Home

        root = Home.from_environment().root
        names = (path.name for folder in folders for path in root.glob(f"{folder}/*"))
        return sorted(name for name in names if name.startswith(incomplete))

    return complete


RunId = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's id, or a unique prefix of it or of its last eight characters.",
        autocompletion=complete_recorded("runs"),
    ),
]
RunsName = Annotated[
    str,
    typer.Argument(
        metavar="RUN-or-EXPERIMENT",
        help="A run, or an experiment or NAME@VERSION with all its runs.",
        autocompletion=complete_recorded("runs", "experiments"),
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Overrides a field of the spec; so does PATH=VALUE alone."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="File to write.")]
Profile = Annotated[str, typer.Option(envvar="RPG_PROFILE", help="A Prefect API's URL or a Prefect profile's name.")]
Pool = Annotated[
    str, typer.Option(help="The work pool whose workers execute it. By default the spec's `launcher.pool`, else rpg.")
]
ServerRecord = Annotated[
    str,
    typer.Option("--profile", help="Read the record of a server: a Prefect API's URL or a Prefect profile's name."),
]
SafeCsv = Annotated[
    bool, typer.Option("--safe-csv", help="In CSV, write text that a spreadsheet would compute (=, +, -, @) as text.")
]
Rows = Annotated[
    list[str] | None,
    typer.Option(
        "--rows",
        metavar="TEXT",
        help="Only rows whose first column contains TEXT. Repeat the option to match any of several texts.",
    ),
]
Digits = Annotated[
    int | None,
    typer.Option(
        "--digits",
        min=0,
        max=15,
        metavar="N",
        help="Digits after the decimal point. By default, as many as the interval's width supports.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def _number_or_auto(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise typer.BadParameter("a number from 1 on, or auto")
    return text


Parallel = Annotated[
    str,
    typer.Option(
        "--parallel",
        metavar="N|auto",
        callback=_number_or_auto,
        help="Number of concurrent runs; auto: as many as the free GPU slots allow, or 1 on a CPU.",
    ),
]
