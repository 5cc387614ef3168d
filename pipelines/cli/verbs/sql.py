"""`rpg sql`: runs a query or a saved query, or opens a prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import Digits, Rows, SafeCsv, ServerRecord
from pipelines.cli.output import Format


def sql(
    query: Annotated[
        str | None,
        typer.Argument(
            metavar="[QUERY]",
            help="One statement; @NAME: the one in queries/NAME.sql; @: list the saved names. Without it, a prompt.",
        ),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]VALUE", help="A value for a `?` of the query, or for its `$NAME`."),
    ] = None,
    chosen: Annotated[
        Format | None, typer.Option("--format", help="Format of the rows; by default, the suffix of FILE decides.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to FILE.")] = None,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Stop a query that takes longer; 0 disables the limit.")
    ] = 60,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most memory of a query, such as 4GiB; by default a quarter of the machine's memory."
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat the query until Ctrl-C.")] = False,
    every: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Seconds between repetitions with --watch.")
    ] = 2,
    only: Rows = None,
    digits: Digits = None,
    profile: ServerRecord = "",
    safe_csv: SafeCsv = False,
) -> None:
    """Runs SQL over everything recorded, also while training runs."""
    import sys
    import time

    from pipelines.cli.output import Choice, form_of, format_of, print_rows, write_stream
    from pipelines.cli.prompt import run_prompt
    from pipelines.cli.reading import reading
    from pipelines.cli.saved_queries import find_query, parse_params, saved_queries
    from pipelines.home.home import Home
    from pipelines.terminal.console import SafeConsole
    from specs.records import LARGE_TABLES, TABLES
    from storage import Store
    from storage.statements.limits import Limits, parse_memory, process_within

    home = Home.from_environment()
    if query == "@":
        rows = [(f"@{saved.name}", saved.description, str(saved.path)) for saved in saved_queries(home).values()]
        print_rows(("name", "question", "file"), rows, as_json=chosen is Format.json)
        return
    if query and query.startswith("@"):
        query = find_query(home, query[1:]).text
    chosen, params = chosen or format_of(output), parse_params(param or [])
    choice = Choice(only or (), digits)
    if choice and chosen is Format.parquet:
        raise typer.BadParameter(
            "Parquet always has all rows and digits; select rows and round numbers in the query", param_hint="--rows"
        )
    limits = Limits(timeout, parse_memory(memory) if memory else 0)
    with reading(profile) as record, Store.open(record.home.root, limits) as store, process_within(limits), _unlogged():
        unnamed = {table for table in LARGE_TABLES if query is not None and table not in query.lower()}
        tables = TABLES.keys() - unnamed
        record.refresh(tables)
        if query is None:
            run_prompt(store, chosen, safe=safe_csv)
            return
        while True:
            with store.stream(query, params, form_of(chosen, choice, safe=safe_csv)) as answer:
                if watch and output is None and sys.stdout.isatty():
                    SafeConsole().clear()
                write_stream(answer, chosen, output, choice, safe=safe_csv)
            if not watch:
                return
            time.sleep(every)
            record.refresh(tables)
            store.refresh()


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Silences the store's log: each query repeats the same warnings."""
    import logging

    log = logging.getLogger("storage")
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False
