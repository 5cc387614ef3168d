"""`rpg compare`: runs or groups of seeds side by side."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import AsJson, SafeCsv, ServerRecord
from pipelines.cli.output import TableFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from pipelines.report.compare import RunComparison
    from pipelines.report.evidence import Group
    from pipelines.report.statistics import Interval

_MOST_FIELDS, _MOST_ROWS = 6, 10
"""Largest numbers of differing fields and of rows of results (the first ones) on one screen."""
_SURE = "accuracy or score that is told from it below (of so many other figures some intervals exclude 0 by chance)"


def compare(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs, experiments or studies: groups of seeds.")
    ],
    profile: ServerRecord = "",
    everything: Annotated[bool, typer.Option("--all", help="Show every differing field and every figure.")] = False,
    kind: Annotated[TableFormat, typer.Option("--format", help="Format of the table of results.")] = (
        TableFormat.table
    ),
    as_json: AsJson = False,
    safe_csv: SafeCsv = False,
) -> None:
    """Compares runs or groups of seeds: the supported conclusions, the differences between specs, the results.

    The output is one screen, with --all everything. With --format latex, markdown or csv it is only the table of
    results; LaTeX needs the package booktabs.
    """
    from pipelines.cli.output import print_json
    from pipelines.cli.reading import reading
    from pipelines.report.compare import compare as compare_groups

    with reading(profile) as record:
        record.refresh()
        comparison = compare_groups(record.home, names)
        record.note_looks(names)
    if as_json or kind is TableFormat.json:
        print_json(comparison.to_json())
    elif kind is TableFormat.table:
        _print(comparison, names, whole=everything)
    else:
        typer.echo(result_text(comparison, kind, safe=safe_csv), nl=False)


def result_text(comparison: RunComparison, kind: TableFormat, *, safe: bool) -> str:
    """Returns the table of results as text for a paper; `safe` as for `csv_text`."""
    from pipelines.cli.output import table_for_papers

    columns, rows = _results(comparison)
    return table_for_papers(columns, rows, kind, safe=safe)


def _print(comparison: RunComparison, names: Sequence[str], *, whole: bool) -> None:
    import sys

    from rich.text import Text

    from pipelines.terminal.console import SafeConsole

    # A pipe has no width to fit into.
    console = SafeConsole(width=None if sys.stdout.isatty() else 10_000)
    found = (f"Diagnosis: {sentence} {remedy}" for sentence, remedy in comparison.diagnosis)
    for line in (*(answer.text for answer in (*comparison.answers, *comparison.costs)), *comparison.notes, *found):
        console.print(Text(line))
    fields = list(comparison.spec)
    if not fields:
        console.print("\nThe specs differ in nothing but the seed.")
    columns, rows = _results(comparison)
    short = rows if whole else [row for row in rows if _on_one_screen(comparison, row[0])][:_MOST_ROWS]
    shown = fields if whole else fields[:_MOST_FIELDS]
    if fields:
        console.print(_spec_table(comparison, shown))
    console.print(_result_table(columns, short))
    if len(comparison.groups) > 1:
        console.print(f"Second lines: difference from the first column; * {_SURE}.")
    if left := len(fields) - len(shown) + len(rows) - len(short):
        console.print(Text(f"\nnext\n  rpg compare {shlex.join(names)} --all  {left} more rows"))


def _on_one_screen(comparison: RunComparison, row: str) -> bool:
    """Returns whether a row of results is shown on one screen: not pass@k, and not every metric."""
    from specs.metrics import BY_NAME

    others = {f"{outcome.measure} {outcome.dataset}" for outcome in comparison.other_measures}
    return row not in others and (row not in BY_NAME or bool(BY_NAME[row].short_name))


def _spec_table(comparison: RunComparison, paths: Sequence[str]) -> Table:
    from pipelines.report.evidence import show

    table = _table("spec", *(group.label for group in comparison.groups))
    for path in paths:
        _add(table, path, *map(show, comparison.spec[path]))
    return table


def _result_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = _table(*columns)
    for row in rows:
        _add(table, *row)
    return table


def _results(comparison: RunComparison) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows, one a figure; every group but the first also shows its difference from the first."""
    from rpg.statistics.wording import CHOSEN

    labels = [group.label for group in comparison.groups]
    rows: dict[str, dict[str, str]] = {}
    for outcome in comparison.outcomes:
        row = rows.setdefault(f"{outcome.measure} {outcome.dataset}", {})
        row[outcome.label] = _cell(outcome.after, outcome.against_first, mark=" *" if outcome.differs else "")
        if outcome.gain is not None:
            rows.setdefault(f"gain {outcome.dataset}", {})[outcome.label] = _cell(outcome.gain, None)
    for cost in comparison.costs:
        for outcome in cost.outcomes:
            name = f"{outcome.measure} {outcome.dataset}"
            if outcome.gain is not None and not outcome.measure.startswith("drift/"):
                rows.setdefault(f"change of {name}", {})[outcome.label] = _cell(outcome.gain, None)
            mark = " *" if outcome.differs else ""
            rows.setdefault(name, {})[outcome.label] = _cell(outcome.after, outcome.against_first, mark=mark)
    for figure in comparison.literature:
        for place, chosen, ours, theirs in (
            ("last", "", figure.last, figure.theirs_last),
            ("best", f" ({CHOSEN})", figure.best, figure.theirs_best),
        ):
            row = rows.setdefault(f"{place} checkpoint {figure.dataset}, ours{chosen}", {})
            row[figure.label] = "-" if ours is None else f"{ours:.4f}"
            rows.setdefault(f"{place} checkpoint {figure.dataset}, theirs", {})[figure.label] = f"{theirs:.4f}"
    for outcome in comparison.other_measures:
        row = rows.setdefault(f"{outcome.measure} {outcome.dataset}", {})
        row[outcome.label] = _cell(outcome.after, outcome.against_first)
    for measure in comparison.measures:
        rows.setdefault(measure.metric, {})[measure.label] = _cell(measure.value, measure.against_first, measure.seeds)
    seeds = [", ".join(str(run.seed) for run in group.runs if run.trains) for group in comparison.groups]
    listed: list[list[str]] = []
    if any(run.trains for group in comparison.groups for run in group.runs):
        listed.append(["seeds", *(each or "-" for each in seeds)])
    listed.append(["states", *(_states(group) for group in comparison.groups)])
    steps = {outcome.label: outcome.step for outcome in comparison.outcomes}
    if len(set(steps.values())) > 1:  # a run that paused or ended early differs from its final state
        listed.append(["evaluated at step", *(str(steps.get(label, "-")) for label in labels)])
    listed += [[name, *(cells.get(label, "-") for label in labels)] for name, cells in rows.items()]
    return ["result", *labels], listed


def _states(group: Group) -> str:
    """Returns `finished`, or the number of runs in each state."""
    counts = Counter(run.status for run in group.runs)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{count} {state}" for state, count in counts.items())


def _cell(value: Interval, against: Interval | None, seeds: Sequence[float] = (), *, mark: str = "") -> str:
    """Returns a figure with its interval, or else with that of each seed; below it the difference from
    the first column."""
    text = _interval(value, "")
    if not value.known and len(seeds) > 1:
        text += f" ({', '.join(f'{seed:.4g}' for seed in seeds)})"
    if against is None:
        return text
    return f"{text}\n  {_interval(against, '+')}{mark}"


def _interval(value: Interval, sign: str) -> str:
    ends = f" [{value.low:{sign}z.4g}, {value.high:{sign}z.4g}]" if value.low == value.low else ""
    return f"{value.value:{sign}z.4g}{ends}"


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """Adds a row of plain text: brackets in names and values are no markup."""
    from rich.text import Text

    table.add_row(*map(Text, cells))
