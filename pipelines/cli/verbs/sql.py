"""`rpg sql`: one query, or a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.output import Format


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
