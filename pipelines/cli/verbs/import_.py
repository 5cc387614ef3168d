"""`rpg import`: imports an exported run into this home."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory that `rpg export` has written.")],
) -> None:
    """Imports an exported run, or all runs of an exported experiment, into this home. Every verb then treats them as if
    they had run here.

    The export is checked file by file first. Exits 1, and changes nothing, if a file is damaged, or if the home has
    another run with that id. Data and base model are not part of an export: stages that need them compute them again.
    """
    import sys

    from pipelines.exchange.arrival import ExportRefusedError, exports_in, import_run
    from pipelines.home.home import Home
    from pipelines.report import write_run_report

    home = Home.from_environment()
    refused = False
    for export in exports_in(directory):
        try:
            is_new = import_run(home, export)
        except ExportRefusedError as error:
            print(error, file=sys.stderr)
            refused = True
            continue
        if is_new:
            write_run_report(home, export.run_id)
        print(export.run_id)
        typer.echo("imported" if is_new else f"{export.run_id} is already in this home, unchanged", err=True)
    if refused:
        raise typer.Exit(1)
