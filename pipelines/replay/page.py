"""A replay's page: its figures over each swept number or, where none is swept, over the steps."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from markupsafe import Markup

from pipelines.replay.run import RunReplay
from pipelines.report.charts import PALETTE, Line, line_chart
from pipelines.report.page import render

Entry = dict[str, Any]
"""`RunReplay.overall`, or one of `RunReplay.steps`: both have the metrics of two objectives and how they compare."""
FIGURES: dict[str, Callable[[Entry], float | None]] = {
    "loss, mean": lambda entry: entry["replayed"].get("loss"),
    "active tokens": lambda entry: entry["replayed"].get("weight/active"),
    "weight m, mean": lambda entry: entry["replayed"].get("weight/mean"),
    "|m|, mean": lambda entry: entry["replayed"].get("weight/size"),
    "cosine": lambda entry: entry["cosine"],
    "clipped low": lambda entry: entry["replayed"].get("clip_fraction/low"),
    "clipped high": lambda entry: entry["replayed"].get("clip_fraction/high"),
    "clipped dual": lambda entry: entry["replayed"].get("clip_fraction/dual"),
    "divergence in loss": lambda entry: entry["replayed"].get("loss/divergence"),
}
"""Heading -> the figure of one objective. Clipped and active tokens are shares of the tokens that were trained on; the
cosine is that of its gradient weights with the run's own."""


def table(replays: Sequence[RunReplay]) -> list[tuple[str, list[float | None]]]:
    """A row an objective, the run's own first: its label and its FIGURES over all steps."""
    own = {"replayed": replays[0].overall["recorded"], "cosine": None}
    rows = [("recorded", own), *((replay.replayed.label, replay.overall) for replay in replays)]
    return [(label, [figure(entry) for figure in FIGURES.values()]) for label, entry in rows]


def page(replays: Sequence[RunReplay]) -> str:
    """A page with the table and a chart of each figure, everything inside it."""
    first = replays[0]
    paths = [
        path for path in first.replayed.swept if all(_is_number(replay.replayed.swept[path]) for replay in replays)
    ]
    return render(
        "replay.html",
        run_id=first.run_id,
        setting=first.recorded.setting,
        num_steps=len(first.steps),
        num_tokens=sum(entry["tokens"] for entry in first.steps),
        headings=list(FIGURES),
        rows=table(replays),
        sections=[_over_values(replays, path) for path in paths] or [_over_steps(replays)],
        left_out=first.left_out,
    )


Section = tuple[str, list[tuple[str, int]], list[Markup]]
"""What the charts share as x, the labels of their lines with their colours, and the charts."""


def _over_values(replays: Sequence[RunReplay], path: str) -> Section:
    """Charts over a swept number; a line for each combination of all else, and a faint one for the run's own figure."""
    lines: dict[str, list[RunReplay]] = {}
    for replay in sorted(replays, key=lambda replay: float(replay.replayed.swept[path])):
        lines.setdefault(replay.replayed.label_without(path), []).append(replay)
    ends = [float(replay.replayed.swept[path]) for replay in replays]
    charts = []
    for heading, figure in FIGURES.items():
        own = figure({"replayed": replays[0].overall["recorded"], "cosine": None})
        drawn = [
            Line(
                [
                    (float(replay.replayed.swept[path]), value)
                    for replay in of_line
                    if (value := figure(replay.overall)) is not None
                ],
                label,
                color,
            )
            for color, (label, of_line) in enumerate(lines.items())
        ]
        if own is not None:
            drawn.append(Line([(min(ends), own), (max(ends), own)], "recorded", len(lines), faint=True))
        charts.append(line_chart(drawn, title=heading, x_label=path))
    return path, _legend([*lines, "recorded"]), charts


def _over_steps(replays: Sequence[RunReplay]) -> Section:
    """Charts over the run's steps; a line for each objective."""
    charts = [
        line_chart(
            [
                Line(
                    [(entry["step"], value) for entry in replay.steps if (value := figure(entry)) is not None],
                    replay.replayed.label,
                    color,
                )
                for color, replay in enumerate(replays)
            ],
            title=heading,
        )
        for heading, figure in FIGURES.items()
    ]
    return "step", _legend(replay.replayed.label for replay in replays), charts


def _legend(labels: Iterable[str]) -> list[tuple[str, int]]:
    return [(label, color % PALETTE) for color, label in enumerate(labels)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
