"""The charts of a page as figures for a paper."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.home.home import Home
from pipelines.report import evidence
from pipelines.report.answer import accuracies_by_step, answers_of, clusters_of, confidence_of, outcomes_of
from pipelines.report.charts import KINDS, Chart
from pipelines.report.curves import accuracy_curves, learning_curves
from pipelines.report.evidence import Group
from pipelines.report.experiment import answer_charts
from pipelines.report.palette import drawn_groups
from pipelines.terminal.cells import spreadsheet_cell
from specs.machine.files import replacing
from storage import Store


def figures_of(
    home: Home, groups: Sequence[Group], names: Sequence[str], *, constant: bool = False
) -> dict[str, Chart]:
    """Returns the figures of groups of seeds by name: accuracies before and after, accuracies during training, training
    metrics.

    Args:
        names: names of the requested experiments.
        constant: also draws the metrics that never change, as level lines, at the end.
    """
    run_ids = [run.run_id for group in groups for run in group.runs]
    confidence = confidence_of(groups)
    with Store.open(home.root) as store:
        evaluated = evidence.accuracies(store, run_ids)
        graded = evidence.graded(store, run_ids)
        found = answers_of(home, store, groups, names, evaluated, graded)
        curves = evidence.metric_curves(store, run_ids)
    results = outcomes_of(found)
    drawn = drawn_groups(groups, results)
    by_step = accuracies_by_step(groups, evaluated, confidence=confidence, clusters=clusters_of(found), graded=graded)
    charts, flat = learning_curves(drawn, curves, confidence=confidence)
    every = [*answer_charts(results, drawn), *accuracy_curves(by_step, drawn), *charts]
    return {chart.name: chart for chart in (*every, *(flat.values() if constant else ()))}


def save_figures(figures: Sequence[Chart], directory: Path, *, safe: bool = False) -> list[Path]:
    """Writes each figure as SVG, PDF and PNG, in the widths of a column and of a page, and its data as CSV.

    Args:
        safe: keeps text of the CSV from being read as a spreadsheet's formula.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in figures:
        stem = re.sub(r"[^\w.-]+", "-", figure.name)
        written += [figure.save(directory / f"{stem}.{kind}") for kind in KINDS]
        written += [figure.save(directory / f"{stem}-wide.{kind}", "page") for kind in KINDS]
        written.append(_save_rows(figure.rows(), directory / f"{stem}.csv", safe=safe))
    return written


def _save_rows(rows: Sequence[dict[str, Any]], path: Path, *, safe: bool) -> Path:
    if safe:
        rows = [{_safe(name): _safe(value) for name, value in row.items()} for row in rows]
    with replacing(path, durable=False) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _safe(value: Any) -> Any:
    return spreadsheet_cell(value) if isinstance(value, str) else value
