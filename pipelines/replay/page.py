"""The page of a replay: figures over each swept number or, without a sweep, over the steps."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipelines.replay.run import RunReplay
from pipelines.report.charts import PALETTE, Chart, Point, line, line_chart
from pipelines.report.page import render

Entry = dict[str, Any]
"""`RunReplay.overall`, or one of `RunReplay.steps`: both have the metrics of two objectives and their comparison."""
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
"""Heading -> figure of one objective. Clipped and active tokens are shares of the trained tokens. The cosine is that
between the gradient weights of the objective and of the run's own objective."""

RECORDED = "recorded"
"""The label of the run's own objective."""


def table(replays: Sequence[RunReplay]) -> list[tuple[str, list[float | None]]]:
    """Returns a row for each objective, with the run's own first. A row has the label and the FIGURES over all
    steps."""
    rows = [(RECORDED, _own(replays[0].overall)), *((replay.replayed.label, replay.overall) for replay in replays)]
    return [(label, [figure(entry) for figure in FIGURES.values()]) for label, entry in rows]


def page(replays: Sequence[RunReplay]) -> str:
    """Returns a self-contained page with the table and a chart of each figure."""
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
        gradients=[
            (replay.replayed.label, list(entry.values())) for replay in replays for entry in replay.gradients or ()
        ],
        gradient_headings=list((first.gradients or [{}])[0]),
        sections=[_over_values(replays, path) for path in paths] or [_over_steps(replays)],
        left_out=first.left_out,
    )


Section = tuple[str, list[tuple[str, int]], list[Chart]]
"""The x label of some charts, the labels and colours of their lines, and the charts."""


def _over_values(replays: Sequence[RunReplay], path: str) -> Section:
    """Returns charts over a swept number, with a line for each combination of the other values, and a faint line for
    the run's own figure."""
    by_value = sorted(replays, key=lambda replay: float(replay.replayed.swept[path]))
    across = [float(replay.replayed.swept[path]) for replay in by_value]
    labels = list(dict.fromkeys(replay.replayed.label_without(path) for replay in replays))

    def chart(heading: str, values: Sequence[float | None], own: float | None) -> Chart | None:
        points: dict[str, list[Point]] = {label: [] for label in labels}
        for replay, x, value in zip(by_value, across, values, strict=True):
            if value is not None:
                points[replay.replayed.label_without(path)].append((x, value))
        lines = [line(of_label, label, color) for color, (label, of_label) in enumerate(points.items())]
        if own is not None:
            lines.append(line([(across[0], own), (across[-1], own)], RECORDED, len(labels), faint=True))
        return line_chart(lines, title=heading, x_label=path)

    own = _own(replays[0].overall)
    charts = [
        chart(heading, [figure(replay.overall) for replay in by_value], figure(own))
        for heading, figure in FIGURES.items()
    ]
    if latest := [replay.gradients[-1] for replay in by_value if replay.gradients]:
        step = f"of the parameters, step {latest[0]['step']}"
        lengths, cosines = ([entry[name] for entry in latest] for name in ("replayed_norm", "cosine"))
        charts.append(chart(f"gradient {step}: length", lengths, latest[0]["recorded_norm"]))
        charts.append(chart(f"gradient {step}: cosine", cosines, None))
    return path, _legend([*labels, RECORDED]), [chart for chart in charts if chart]


def _over_steps(replays: Sequence[RunReplay]) -> Section:
    """Returns charts over the run's steps, with a line for each objective."""
    labels = [*(replay.replayed.label for replay in replays), RECORDED]
    entries = [*(replay.steps for replay in replays), [_own(entry) for entry in replays[0].steps]]
    charts = [
        line_chart(
            [
                line([(entry["step"], value) for entry in steps if (value := figure(entry)) is not None], label, color)
                for color, (label, steps) in enumerate(zip(labels, entries, strict=True))
            ],
            title=heading,
        )
        for heading, figure in FIGURES.items()
    ]
    return "step", _legend(labels), [chart for chart in charts if chart]


def _own(entry: Entry) -> Entry:
    """Returns the entry with the run's own objective in place of the other one, and without the cosine, which would
    compare the objective with itself."""
    return {**entry, "replayed": entry["recorded"], "cosine": None}


def _legend(labels: Iterable[str]) -> list[tuple[str, int]]:
    return [(label, color % PALETTE) for color, label in enumerate(labels)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
