"""`rpg compare`: runs or groups of seeds side by side."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import AsJson, Digits, Rows, SafeCsv, ServerRecord
from pipelines.cli.output import TableFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from pipelines.cli.output import Choice
    from pipelines.report.compare import RunComparison
    from pipelines.report.evidence import Group
    from pipelines.report.statistics import Interval

_MOST_FIELDS, _MOST_ROWS = 6, 10
"""Numbers of differing fields and of rows of results on one screen. The first ones are shown."""
_FIGURES = 3
"""Number of columns that every table for a paper has: result, group and value."""
_SURE = "accuracy or score that differs by the verdict (of many other figures some intervals exclude 0 by chance)"


def compare(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs, experiments or studies: groups of seeds.")
    ],
    profile: ServerRecord = "",
    everything: Annotated[bool, typer.Option("--all", help="Show every differing field and every figure.")] = False,
    kind: Annotated[TableFormat, typer.Option("--format", help="Format of the table of results.")] = (
        TableFormat.table
    ),
    rows: Rows = None,
    digits: Digits = None,
    as_json: AsJson = False,
    safe_csv: SafeCsv = False,
) -> None:
    """Compares runs or groups of seeds: the supported conclusions, the differences between specs, the results.

    The output is one screen, with --all everything. With --format latex, markdown, html or csv it is only the table of
    results, a row for each group, with differences and intervals in columns of their own; LaTeX needs the package
    booktabs.
    """
    from pipelines.cli.output import Choice, print_json
    from pipelines.cli.reading import reading
    from pipelines.report.compare import compare as compare_groups

    with reading(profile) as record:
        record.refresh()
        comparison = compare_groups(record.home, names)
        record.note_looks(names)
    if as_json or kind is TableFormat.json:
        print_json(comparison.to_json())
    elif kind is TableFormat.table:
        again = shlex.join([*names, *(["--profile", profile] if profile else [])])
        _print(comparison, again, Choice(rows or (), digits), whole=everything)
    else:
        typer.echo(result_text(comparison, kind, Choice(rows or (), digits), safe=safe_csv), nl=False)


def result_text(comparison: RunComparison, kind: TableFormat, choice: Choice, *, safe: bool) -> str:
    """Returns the table of results as text for a paper: a row for each figure of each group. `safe` as for
    `csv_text`."""
    from pipelines.cli.output import table_for_papers

    columns, rows = _by_group(comparison, choice.digits)
    if kind is not TableFormat.csv:  # whose column has one name for any experiment
        columns[1] = comparison.groups[0].key or columns[1]
    chosen = replace(choice, digits=None).of_table(rows)
    kept = [place for place, _ in enumerate(columns) if place < _FIGURES or any(row[place] for row in chosen)]
    shown = [[row[place] for place in kept] for row in chosen]
    return table_for_papers([columns[place] for place in kept], shown, kind, caption=_caption(comparison), safe=safe)


def _by_group(comparison: RunComparison, digits: int | None) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows for a paper: result, group, value, interval, difference from the first group, its
    interval. Shares are in percent."""
    from pipelines.report.answer import digits_of, figure_and_interval
    from pipelines.report.statistics import Interval
    from rpg.statistics.wording import CHOSEN

    results: dict[tuple[str, bool], list[tuple[str, Interval, Interval | None, bool]]] = {}
    """(name, whether it is a share) -> (group, value, difference from the first group, whether it differs)"""
    equal_drift = [outcome for answer in comparison.equal_drift for outcome in answer.outcomes]
    costs = [outcome for cost in comparison.costs for outcome in cost.outcomes]
    for outcome in (*comparison.outcomes, *equal_drift, *costs, *comparison.other_measures):
        row = (outcome.label, outcome.after, outcome.against_first, outcome.differs)
        results.setdefault((f"{outcome.measure} {outcome.dataset}", outcome.is_share), []).append(row)
        if outcome.gain is not None and outcome in comparison.outcomes:
            gain = (outcome.label, outcome.gain, None, False)
            results.setdefault((f"gain {outcome.dataset}", outcome.is_share), []).append(gain)
    for published in comparison.literature:
        for name, figure in (
            ("last checkpoint, ours", published.last),
            ("last checkpoint, theirs", published.theirs_last),
            (f"best checkpoint, ours ({CHOSEN})", published.best),
            ("best checkpoint, theirs", published.theirs_best),
        ):
            if figure is not None:
                alone = (published.label, Interval(figure, math.nan, math.nan), None, False)
                results.setdefault((f"{name}, {published.dataset}", True), []).append(alone)
    for measure in comparison.measures:
        of_metric = (measure.label, measure.value, measure.against_first, False)
        results.setdefault((measure.metric, False), []).append(of_metric)
    rows = []
    for (name, share), of_result in results.items():
        intervals = [interval for _, value, against, _ in of_result for interval in (value, against)]
        places = digits_of(intervals, share=share) if digits is None else digits
        for label, value, against, differs in of_result:
            gap = figure_and_interval(against, places, share=share, sign="+") if against else ("", "")
            own = figure_and_interval(value, places, share=share)
            rows.append([f"{name}, %" if share else name, label, *own, gap[0] + " *" * differs, gap[1]])
    columns = ["result", "group", "value", "interval", "difference", "its interval"]
    return columns, rows


def _caption(comparison: RunComparison) -> str:
    """Returns the seeds and problems behind the figures, and the meaning of the columns."""
    outcomes = comparison.outcomes
    seeds = _range([outcome.num_seeds for outcome in outcomes] or [len(group.runs) for group in comparison.groups])
    means = f"Means over {seeds} {'seed' if seeds == '1' else 'seeds'}"
    if outcomes:
        means += f" and {_range([outcome.num_problems for outcome in outcomes])} problems"
    confidence = comparison.groups[0].runs[0].spec.evaluation.confidence
    told = f" Differences are from {comparison.groups[0].named}; * marks those that the verdict supports."
    return f"{means}, with {100 * confidence:g} % intervals.{told if len(comparison.groups) > 1 else ''}"


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _print(comparison: RunComparison, again: str, choice: Choice, *, whole: bool) -> None:
    """Prints the comparison. `again`: the command's arguments, to be called again with more options."""
    import sys

    from rich.text import Text

    from pipelines.terminal.console import SafeConsole

    # A pipe has no width to fit into.
    console = SafeConsole(width=None if sys.stdout.isatty() else 10_000)
    found = (f"Diagnosis: {sentence} {remedy}" for sentence, remedy in comparison.diagnosis)
    answers = (*comparison.answers, *comparison.equal_drift, *comparison.costs)
    for line in (*(answer.text for answer in answers), *comparison.notes, *found):
        console.print(Text(line))
    fields = list(comparison.spec)
    if not fields:
        console.print("\nThe specs differ in nothing but the seed.")
    columns, rows = _results(comparison, choice.digits)
    whole = whole or bool(choice.rows)
    every = replace(choice, digits=None).of_table(rows)
    short = every if whole else [row for row in every if _on_one_screen(comparison, row[0])][:_MOST_ROWS]
    shown = fields if whole else fields[:_MOST_FIELDS]
    if fields:
        console.print(_spec_table(comparison, shown))
    console.print(_result_table(columns, short))
    if len(comparison.groups) > 1:
        console.print(f"Second lines: difference from the first column; * {_SURE}.")
    if left := len(fields) - len(shown) + len(every) - len(short):
        console.print(Text(f"\nnext\n  rpg compare {again} --all  {left} more rows"))


def _on_one_screen(comparison: RunComparison, row: str) -> bool:
    """Returns whether a row of results is shown on one screen. pass@k and some metrics are not."""
    from specs.metrics import BY_NAME

    others = {f"{outcome.measure} {outcome.dataset}" for outcome in comparison.other_measures}
    return row not in others and (row not in BY_NAME or bool(BY_NAME[row].short_name))


def _spec_table(comparison: RunComparison, paths: Sequence[str]) -> Table:
    from pipelines.report.evidence import show

    table = _table(_header("spec", comparison), *(group.label for group in comparison.groups))
    for path in paths:
        _add(table, path, *map(show, comparison.spec[path]))
    return table


def _result_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = _table(*columns)
    for row in rows:
        _add(table, *row)
    return table


def _results(comparison: RunComparison, digits: int | None) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows, one row per figure. Every group but the first also shows its difference from the
    first."""
    from rpg.statistics.wording import CHOSEN

    labels = [group.label for group in comparison.groups]
    rows: dict[str, dict[str, str]] = {}
    equal_drift = [outcome for answer in comparison.equal_drift for outcome in answer.outcomes]
    for outcome in (*comparison.outcomes, *equal_drift):
        row = rows.setdefault(f"{outcome.measure} {outcome.dataset}", {})
        row[outcome.label] = _cell(outcome.after, outcome.against_first, digits, mark=" *" if outcome.differs else "")
        if outcome.gain is not None:
            gain = outcome.measure.replace("accuracy", "gain").replace("score", "gain")
            rows.setdefault(f"{gain} {outcome.dataset}", {})[outcome.label] = _cell(outcome.gain, None, digits)
    for cost in comparison.costs:
        for outcome in cost.outcomes:
            name = f"{outcome.measure} {outcome.dataset}"
            if outcome.gain is not None and not outcome.measure.startswith("drift/"):
                rows.setdefault(f"change of {name}", {})[outcome.label] = _cell(outcome.gain, None, digits)
            mark = " *" if outcome.differs else ""
            rows.setdefault(name, {})[outcome.label] = _cell(outcome.after, outcome.against_first, digits, mark=mark)
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
        row[outcome.label] = _cell(outcome.after, outcome.against_first, digits)
    for measure in comparison.measures:
        rows.setdefault(measure.metric, {})[measure.label] = _cell(
            measure.value, measure.against_first, digits, measure.seeds
        )
    seeds = [", ".join(str(run.seed) for run in group.runs if run.trains) for group in comparison.groups]
    listed: list[list[str]] = []
    if any(run.trains for group in comparison.groups for run in group.runs):
        listed.append(["seeds", *(each or "-" for each in seeds)])
    listed.append(["states", *(_states(group) for group in comparison.groups)])
    steps = {outcome.label: outcome.step for outcome in comparison.outcomes}
    if len(set(steps.values())) > 1:  # a run that paused or ended early differs from its final state
        listed.append(["evaluated at step", *(str(steps.get(label, "-")) for label in labels)])
    listed += [[name, *(cells.get(label, "-") for label in labels)] for name, cells in rows.items()]
    return [_header("result", comparison), *labels], listed


def _header(what: str, comparison: RunComparison) -> str:
    """Returns the header of a first column, with the fields whose values are the other headers: `result, by
    clip.high`.
    """
    key = comparison.groups[0].key
    return f"{what}, by {key}" if key else what


def _states(group: Group) -> str:
    """Returns `finished`, or the number of runs in each state."""
    counts = Counter(run.status for run in group.runs)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{count} {state}" for state, count in counts.items())


def _cell(
    value: Interval, against: Interval | None, digits: int | None, seeds: Sequence[float] = (), *, mark: str = ""
) -> str:
    """Returns a figure with its interval, or with one value per seed; below it the difference from the first column."""
    form = "z.4g" if digits is None else f"z.{digits}f"
    text = _interval(value, form)
    if not value.known and len(seeds) > 1:
        text += f" ({', '.join(format(seed, form) for seed in seeds)})"
    if against is None:
        return text
    return f"{text}\n  {_interval(against, f'+{form}')}{mark}"


def _interval(value: Interval, form: str) -> str:
    ends = f" [{value.low:{form}}, {value.high:{form}}]" if value.known else ""
    return f"{value.value:{form}}{ends}"


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """Adds a row of plain text. Brackets in names and values are not read as markup."""
    from rich.text import Text

    table.add_row(*map(Text, cells))
