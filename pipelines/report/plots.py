"""Charts that are not lines over steps: intervals, bars, parallel coordinates, trials as dots, and a value over two
parameters."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.report.charts import (
    Chart,
    Layer,
    Row,
    as_it_is,
    extent,
    ink,
    layer,
    line,
    line_layers,
    number,
    short,
)
from pipelines.report.statistics import Interval

_BANDWIDTH = 0.12
"""Bandwidth of the smoothed surface, as a share of each axis."""
_CELLS = 24
"""Cells of the surface along each axis."""
_LEAST_WEIGHT = 0.2
"""Least sum of the kernels of all trials. A cell with a smaller sum has no trial near it, and is blank."""
_ROW = 44
"""Height in pixels of a row and of the name above it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A value with its interval, as one mark in a row of an interval chart."""

    label: str
    interval: Interval
    color: int = 0
    hollow: bool = False
    """Whether the mark is a ring: the state before training."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Scale of a parameter's values along an axis."""

    names: tuple[str, ...] = ()
    """Names of a parameter's choices, which are at 0, 1, and so on. Empty for a number."""
    log: bool = False
    """Whether values are logarithms to base 10."""
    whole: bool = False
    """Whether only whole numbers are marked."""

    def axis(self, values: Sequence[float]) -> Layer:
        """Returns the scale and the marks of an axis that contains the values."""
        if self.names:
            marks = {"values": list(range(len(self.names))), "labelExpr": f"{json.dumps(self.names)}[datum.value]"}
            return {"scale": {"domain": [-0.5, len(self.names) - 0.5]}, "axis": marks}
        if self.log:
            marks = {"labelExpr": "format(pow(10, datum.value), '.4~g')"}
        else:
            marks = {"labelExpr": "datum.value % 1 ? '' : format(datum.value, ',d')"} if self.whole else {}
        # `padding`, pixels: keeps a dot at an end clear of the marks.
        return {"scale": {"domain": extent(values), "padding": 8}, "axis": marks}


def mark(
    x: float,
    y: float,
    text: str,
    interval: Interval | None = None,
    *,
    color: int = 0,
    hollow: bool = False,
    **more: Any,
) -> Row:
    """Returns a dot of a chart, e.g. one trial.

    Args:
        text: shown at the pointer.
        interval: interval of its value; None, or an unknown one, is not drawn.
        color: index into the palette of the style sheet.
        hollow: drawn as a ring: the state before training, or a trial that was pruned or breaks a constraint.
        more: further columns, such as `opacity`.
    """
    ends = {"low": interval.low, "high": interval.high} if interval and interval.known else {}
    fill = "var(--card)" if hollow else ink(color)
    return {"x": x, "y": y, "text": text, "color": ink(color), "fill": fill, "opacity": 1, **ends, **more}


def interval_chart(
    rows: Sequence[tuple[str, Sequence[Mark]]], *, title: str, name: str = "", share: bool = False
) -> Chart | None:
    """Returns rows of dots with whiskers on a shared scale, each below its name; None if there are no marks.

    Args:
        rows: name of each row and its marks, one below the other.
        share: the values are shares, so the scale stays within 0 and 1.
    """
    marks = []
    for index, (label, row) in enumerate(rows):
        for place, each in enumerate(row):
            found = each.interval
            text = f"{each.label}: {found.value:.3f}" + (f" [{found.low:.3f}, {found.high:.3f}]" if found.known else "")
            # A little apart: overlapping intervals would hide each other.
            y, named = index + 0.22 * (place - (len(row) - 1) / 2), {"line": label, "mark": each.label}
            marks.append(mark(found.value, y, text, found, color=each.color, hollow=each.hollow, **named))
    if not marks:
        return None
    ends = np.array([each[end] for each in marks for end in ("x", "low", "high") if end in each])
    domain = np.clip(extent(np.clip(ends, 0, 1)), 0, 1).tolist() if share else extent(ends)
    whisker = {"type": "rule", "strokeWidth": 2.5, "opacity": 0.75, "clip": True}
    return Chart(
        title,
        [_NAMES, layer("marks", whisker, only=_KNOWN, x="low", x2="high"), _MARKS],
        {"marks": marks, "names": [{"y": place - 0.42, "text": label} for place, (label, _) in enumerate(rows)]},
        x={"title": None, "scale": {"domain": domain, "nice": True}, "axis": {"grid": True}},
        y=_by_row(len(rows)),
        height=50 + _ROW * len(rows),
        columns={"line": "line", "mark": "mark", "x": "value", "low": "low", "high": "high"},
        name=name,
    )


def bar_chart(bars: Sequence[tuple[str, float]], *, title: str, unit: str = "") -> Chart | None:
    """Returns horizontal bars from 0, in the given order, each below its name; None without bars."""
    if not bars:
        return None
    marks = [mark(value, place, f"{number(value)}{unit}") for place, (_, value) in enumerate(bars)]
    return Chart(
        title,
        [_NAMES, layer("marks", {"type": "rule", "strokeWidth": 14}, x2={"datum": 0}), _BESIDE],
        {"marks": marks, "names": [{"y": place - 0.42, "text": name} for place, (name, _) in enumerate(bars)]},
        # A fifth is left for the text beside the longest bar.
        x={"scale": {"domain": [0, 1.25 * max(value for _, value in bars) or 1]}, "axis": None},
        y=_by_row(len(bars)),
        height=34 + _ROW * len(bars),
    )


@dataclass(frozen=True, slots=True)
class ParallelAxis:
    """One vertical axis of a chart in parallel coordinates."""

    name: str
    places: Sequence[float]
    """Height at which each path crosses the axis, from 0 at the bottom to 1."""
    marks: Sequence[tuple[float, str]]
    """(height, text) of the marks beside the axis."""


def parallel_chart(parallel_axes: Sequence[ParallelAxis], shades: Sequence[float], *, title: str) -> Chart | None:
    """Returns one path for each trial across all parameters. The best is drawn strongest. None without a path.

    Args:
        shades: from 0, the worst, to 1, the best.
    """
    if not parallel_axes or not shades:
        return None
    last = len(parallel_axes) - 1
    paths = [
        line([(place, round(axis.places[path], 4)) for place, axis in enumerate(parallel_axes)])
        | {"opacity": 0.12 + 0.85 * shade, "stroke": 1 + 1.6 * shade}
        for path, shade in enumerate(shades)
    ]
    # A long name stays within the picture at either end, and clear of its neighbours.
    names = [{"x": x, "y": 1.12 + 0.1 * (x % 2), "text": axis.name} for x, axis in enumerate(parallel_axes)]
    marks = [{"x": x, "y": y, "text": text} for x, axis in enumerate(parallel_axes) for y, text in axis.marks]
    align = {"expr": f"datum.x == 0 ? 'left' : datum.x == {last} ? 'right' : 'center'"}
    return Chart(
        title,
        [
            *line_layers(paths),
            layer("names", {"type": "rule", "color": "var(--soft)"}, y={"datum": 0}, y2={"datum": 1}),
            layer("names", _TEXT | {"align": align}, text="text"),
            # Text that crosses lines is drawn twice, first with a halo.
            _BESIDE | {"mark": _BESIDE["mark"] | {"stroke": "var(--card)", "strokeWidth": 4}},
            _BESIDE,
        ],
        {"lines": paths, "names": names, "marks": marks},
        # Beyond the last axis is room for its marks.
        x={"scale": {"domain": [0, last + 0.3]}, "axis": None},
        y={"scale": {"domain": [-0.12, 1.25]}, "axis": None},
        height=280,
    )


def dot_chart(
    dots: Sequence[Row], *, title: str, scale: Scale = Scale(), x_label: str = "", lines: Sequence[Row] = ()
) -> Chart | None:
    """Returns dots in front of lines, with whiskers if they have intervals; None without dots.

    Args:
        dots: rows of `mark`.
        lines: rows of `line`.
    """
    if not dots:
        return None
    lines = [line for line in lines if line["x"]]
    whisker = {"type": "rule", "strokeWidth": 1.2, "opacity": 0.45}
    return Chart(
        title,
        [*line_layers(lines), layer("marks", whisker, only=_KNOWN, y="low", y2="high"), _MARKS],
        {"marks": dots, "lines": lines},
        x={"title": x_label or None, **scale.axis([dot["x"] for dot in dots])},
        y=Scale().axis([dot[end] for dot in dots for end in ("y", "low", "high") if end in dot]),
    )


def surface_chart(
    dots: Sequence[Row],
    values: Sequence[float],
    *,
    title: str,
    scales: tuple[Scale, Scale],
    x_label: str = "",
    doubts: Sequence[float] = (),
    path: Sequence[tuple[float, float]] = (),
) -> Chart | None:
    """Returns a chart of a value over two parameters: trials as dots on a smoothed surface, which is blank far from all
    trials.

    Args:
        dots: rows of `mark`; x and y are the parameters.
        values: value of each dot; larger values make the surface darker.
        scales: scales of x and of y.
        doubts: uncertainty of each dot's value; larger ones make the surface's cells smaller. Empty draws all cells
            whole.
        path: points that a line joins.
    """
    if len(dots) < 3 or min(values) == max(values):
        return None
    axes = [scale.axis([dot[along] for dot in dots]) for scale, along in zip(scales, "xy", strict=True)]
    ends = [axis["scale"]["domain"] for axis in axes]
    surface = smoothed(dots, values, *ends)
    low, high = float(np.nanmin(surface)), float(np.nanmax(surface))
    doubt = smoothed(dots, doubts, *ends) / (max(doubts) or 1.0) if doubts else np.zeros_like(surface)
    rows, columns = np.nonzero(np.isfinite(surface))
    shade = (surface[rows, columns] - low) / (high - low) if high > low else np.full(rows.size, 0.5)
    # An uncertain cell has a blank part on each side.
    blank = 0.3 * doubt[rows, columns]
    cells: Row = {"opacity": short(0.05 + 0.6 * shade), "color": ink(0)}
    for name, (first, end), index in (("x", ends[0], columns), ("y", ends[1], rows)):
        width = (end - first) / _CELLS
        cells[name], cells[f"{name}2"] = (short(first + (index + at) * width) for at in (blank, 1 - blank))
    lists = [name for name in cells if name != "color"]
    square = layer("cells", {"type": "rect"}, *lists, opacity=as_it_is("opacity"), x2="x2", y2="y2")
    lines = [line(path, color=2)] if len(path) > 1 else []
    return Chart(
        title,
        [square, *line_layers(lines), _MARKS],
        {"cells": [cells], "marks": dots, "lines": lines},
        x={"title": x_label or None, **axes[0]},
        y=axes[1],
    )


def smoothed(
    dots: Sequence[Row], values: Sequence[float], x: Sequence[float], y: Sequence[float]
) -> NDArray[np.float64]:
    """Returns the mean of the values near each cell, by a Gaussian kernel; NaN if none is near.

    Args:
        x: ends of the axis.
        y: ends of the other axis.
    Returns:
        [cells of y, cells of x]
    """
    centres = (np.arange(_CELLS) + 0.5) / _CELLS
    places = np.array([((dot["x"] - x[0]) / (x[1] - x[0]), (dot["y"] - y[0]) / (y[1] - y[0])) for dot in dots])
    across, upward = (np.exp(-0.5 * ((centres[:, None] - places[:, side]) / _BANDWIDTH) ** 2) for side in (0, 1))
    weights = np.einsum("yn,xn->yxn", upward, across)
    total = weights.sum(axis=2)
    means: NDArray[np.float64] = np.where(total < _LEAST_WEIGHT, np.nan, weights @ np.asarray(values) / total)
    return means


_KNOWN = "isValid(datum.low)"
"""Condition on marks that have an interval."""
_POINT = {"type": "point", "size": 60, "strokeWidth": 2}
_MARKS = layer("marks", _POINT, fill=as_it_is("fill"), opacity=as_it_is("opacity"), tooltip="text")
"""Dots and rings. Hovering over one shows its text."""
_TEXT = {"type": "text", "align": "left", "color": "var(--ink)"}
_NAMES = layer("names", _TEXT | {"limit": {"expr": "width"}}, x={"value": 0}, text="text")
"""Names of rows, each at the left above its row."""
_BESIDE = layer("marks", _TEXT | {"dx": 6, "color": "var(--soft)"}, text="text")


def _by_row(num_rows: int) -> Layer:
    return {"scale": {"domain": [num_rows - 0.5, -0.7]}, "axis": None}
