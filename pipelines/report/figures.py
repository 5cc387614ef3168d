"""The charts of a page as figures for a paper: the same lines, intervals and colours, drawn by matplotlib."""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipelines.home.home import Home
from pipelines.report import evidence
from pipelines.report.answer import accuracies_by_step, answers_of, clusters_of, confidence_of, outcomes_of
from pipelines.report.charts import PALETTE, Chart, Line
from pipelines.report.curves import accuracy_curves, learning_curves
from pipelines.report.evidence import Group
from pipelines.report.experiment import answer_charts
from pipelines.report.palette import drawn_groups
from pipelines.report.plots import IntervalChart, Mark
from pipelines.terminal.cells import spreadsheet_cell
from specs.machine.files import replacing
from storage import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

Width = Literal["column", "page"]
WIDTHS: dict[Width, float] = {"column": 3.25, "page": 6.75}
"""Inches: a column of a page in two columns, and the whole page, as conferences and journals set them."""
KINDS = ("svg", "pdf", "png")
_STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3
    "svg.hashsalt": "rpg",
    "savefig.dpi": 300,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart of a page. A notebook shows it as it stands."""

    chart: Chart | IntervalChart

    @property
    def name(self) -> str:
        """What `Outcome.figure` and the files call it: `reward/mean`, `accuracy/held_out`."""
        return self.chart.name

    @property
    def title(self) -> str:
        """Title in words."""
        return self.chart.title

    def rows(self) -> list[dict[str, Any]]:
        """The figure's data: a row for each point of a line, or for each value with its interval."""
        return list(_points(self.chart) if isinstance(self.chart, Chart) else _values(self.chart))

    def draw(self, width: Width = "column") -> "Drawing":
        """The figure as matplotlib has it, to be changed or laid out with others."""
        import matplotlib
        from matplotlib.figure import Figure as Drawing

        with matplotlib.rc_context(_STYLE):
            drawing = Drawing(figsize=(WIDTHS[width], self._height(width)), layout="constrained")
            axes = drawing.add_subplot()
            if isinstance(self.chart, Chart):
                _draw_lines(axes, self.chart)
            else:
                _draw_intervals(axes, self.chart)
        return drawing

    def save(self, path: str | Path, width: Width = "column") -> Path:
        """Writes the figure. The name's ending says as what: .svg, .pdf or .png."""
        import matplotlib

        path = Path(path)
        kind = path.suffix.removeprefix(".")
        if kind not in KINDS:
            raise ValueError(f"a figure is saved as {', '.join(f'.{each}' for each in KINDS)}, not as {path.name!r}")
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        with matplotlib.rc_context(_STYLE), replacing(path, durable=False) as aside:
            self.draw(width).savefig(aside, format=kind, metadata=undated)
        return path

    def svg(self, width: Width = "column") -> str:
        """The figure as SVG text."""
        import matplotlib

        text = StringIO()
        with matplotlib.rc_context(_STYLE):
            self.draw(width).savefig(text, format="svg", metadata={"Date": None})
        return text.getvalue()

    def _repr_svg_(self) -> str:
        return self.svg("page")

    def _height(self, width: Width) -> float:
        if isinstance(self.chart, Chart):
            return WIDTHS[width] * (0.62 if width == "column" else 0.42)
        return 0.6 + 0.34 * len(self.chart.rows)


def figures_of(
    home: Home, groups: Sequence[Group], names: Sequence[str], *, constant: bool = False
) -> dict[str, Figure]:
    """The figures of groups of seeds by name: accuracies before and after, accuracies on the way, training metrics.

    Args:
        names: of the experiments that are asked about.
        constant: with the metrics that never change, as a level line each, at the end.
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
    every: list[Chart | IntervalChart] = [*answer_charts(results, drawn), *accuracy_curves(by_step, drawn), *charts]
    every += flat.values() if constant else ()
    return {chart.name: Figure(chart) for chart in every}


def save_figures(figures: Sequence[Figure], directory: Path, *, safe: bool = False) -> list[Path]:
    """Writes each figure as SVG, PDF and PNG, a column and a page wide, and its data as CSV.

    Args:
        safe: no text of the CSV is a spreadsheet's formula.
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


def palette() -> list[str]:
    """The colours of a page on white, by the index of a line's colour."""
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    return [re.search(rf"--c{index}: (#\w+);", style)[1] for index in range(PALETTE)]  # type: ignore[index]


def _points(chart: Chart) -> Iterator[dict[str, Any]]:
    for line in chart.lines:
        ends = [{point[0]: point[1] for point in end} for band in line.bands[:1] for end in band]
        for x, y in ((float(point[0]), float(point[1])) for point in line.points):
            row: dict[str, Any] = {"line": line.label, chart.x_label: x, "value": y}
            yield row | ({"low": ends[0].get(x), "high": ends[1].get(x)} if ends else {})


def _values(chart: IntervalChart) -> Iterator[dict[str, Any]]:
    for label, marks in chart.rows:
        for mark in marks:
            interval = mark.interval
            yield {
                "line": label,
                "mark": mark.label,
                "value": interval.value,
                "low": interval.low,
                "high": interval.high,
            }


def _draw_lines(axes: "Axes", chart: Chart) -> None:
    colors = palette()
    for line in sorted(chart.lines, key=lambda line: not line.faint):
        color = colors[line.color % PALETTE]
        for low, high in line.bands:
            across = [x for x, _ in low]
            axes.fill_between(across, [y for _, y in low], [y for _, y in high], color=color, alpha=0.18, linewidth=0)
        axes.plot(
            [point[0] for point in line.points],
            [point[1] for point in line.points],
            color=color,
            label=line.label or "_",
            **_strokes(line),
        )
    axes.set_xlabel(chart.x_label)
    axes.set_title(chart.title, loc="left")
    if sum(bool(line.label) for line in chart.lines) > 1:
        axes.legend()


def _strokes(line: Line) -> dict[str, Any]:
    alone = len(line.points) == 1
    return {
        "linewidth": 0.6 if line.faint else 1.2,
        "alpha": 0.45 if line.faint else 1.0,
        "drawstyle": "steps-post" if line.steps else "default",
        "linestyle": "none" if line.dots else "-",
        "marker": "o" if line.dots or alone else "",
        "markersize": 3,
    }


def _draw_intervals(axes: "Axes", chart: IntervalChart) -> None:
    colors = palette()
    for place, (_, marks) in enumerate(chart.rows):
        for index, mark in enumerate(marks):
            _draw_interval(axes, mark, place + 0.22 * (index - (len(marks) - 1) / 2), colors[mark.color % PALETTE])
    axes.set_yticks(range(len(chart.rows)), [label for label, _ in chart.rows])
    axes.set_ylim(len(chart.rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_title(chart.title, loc="left")


def _draw_interval(axes: "Axes", mark: Mark, at: float, color: str) -> None:
    interval = mark.interval
    if math.isfinite(interval.low) and math.isfinite(interval.high):
        axes.plot([interval.low, interval.high], [at, at], color=color, linewidth=1.2)
    face = "white" if mark.hollow else color
    axes.plot([interval.value], [at], "o", color=color, markerfacecolor=face, markersize=4)
