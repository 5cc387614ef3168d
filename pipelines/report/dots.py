"""Charts of dots: trials over their number or a parameter, goals against each other, a value over two parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from pipelines.report.charts import Axis, Frame, Line, axis, color_class, number, polyline

_BANDWIDTH = 0.12
"""Bandwidth of the smoothed surface, as a share of each axis."""
_CELLS = 24
"""Cells of the surface along each axis."""
_LEAST_WEIGHT = 0.2
"""Where the kernels of all trials add up to less there is no trial near, and the surface is left blank."""


@dataclass(frozen=True, slots=True)
class Dot:
    """One trial in a chart."""

    x: float
    y: float
    label: str
    """What a pointer shows."""
    shade: float = 1.0
    """From 0, pale, to 1."""
    low: float = math.nan
    """Lower end of y's interval; NaN: none is drawn."""
    high: float = math.nan
    """Its upper end."""
    hollow: bool = False
    """Drawn as a ring: a trial that was pruned, or that breaks a constraint."""
    color: int = 0
    """Index into the palette of the style sheet."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How the values of a parameter lie along an axis."""

    names: tuple[str, ...] = ()
    """Names of the choices at 0, 1, ..., where the parameter is one of several."""
    log: bool = False
    """Values are logarithms to base 10."""
    whole: bool = False
    """Only whole numbers are marked."""

    def axis(self, values: Sequence[float]) -> Axis:
        """An axis that holds the values."""
        if self.names:
            return Axis(-0.5, len(self.names) - 0.5, tuple(float(index) for index in range(len(self.names))))
        fitted = axis(values)
        ticks = tuple(tick for tick in fitted.ticks if not self.whole or self.log or tick.is_integer())
        return Axis(fitted.low, fitted.high, ticks)

    def marks(self, fitted: Axis) -> Sequence[str]:
        """The text at each mark of an axis."""
        return self.names or [number(10.0**tick if self.log else tick) for tick in fitted.ticks]


def dot_chart(
    dots: Sequence[Dot], *, title: str, scale: Scale = Scale(), x_label: str = "", lines: Sequence[Line] = ()
) -> Markup:
    """Dots, with whiskers where they have intervals, over lines; empty without dots."""
    if not dots:
        return Markup("")
    ends = [end for dot in dots for end in (dot.y, dot.low, dot.high) if math.isfinite(end)]
    x = scale.axis([dot.x for dot in dots])
    frame = Frame(x, axis(ends))
    drawn = [polyline(line, frame) for line in lines if line.points]
    drawn += [_whisker(dot, frame) for dot in dots if math.isfinite(dot.low)]
    drawn += [_dot(dot, frame) for dot in dots]
    return frame.svg(title, "".join(drawn), x_label, x_names=scale.marks(x))


def surface_chart(
    dots: Sequence[Dot],
    values: Sequence[float],
    *,
    title: str,
    scales: tuple[Scale, Scale],
    x_label: str = "",
    doubts: Sequence[float] = (),
    path: Sequence[tuple[float, float]] = (),
) -> Markup:
    """A value over two parameters: trials as dots on a smoothed surface, which is blank where no trial is near.

    Args:
        dots: x and y are the parameters; the shade is drawn over the surface.
        values: of each dot; the surface is the darker, the larger they are.
        scales: of x and of y.
        doubts: how uncertain each dot's value is; the surface's cells are the smaller, the larger they are. Empty: all
            cells are whole.
        path: points that a line joins.
    """
    if len(dots) < 3 or min(values) == max(values):
        return Markup("")
    x, y = scales[0].axis([dot.x for dot in dots]), scales[1].axis([dot.y for dot in dots])
    frame = Frame(x, y)
    surface = smoothed(dots, values, x, y)
    low, high = float(np.nanmin(surface)), float(np.nanmax(surface))
    doubt = smoothed(dots, doubts, x, y) / (max(doubts) or 1.0) if doubts else np.zeros_like(surface)
    drawn = []
    width, height = (x.high - x.low) / _CELLS, (y.high - y.low) / _CELLS
    for row, column in zip(*np.nonzero(np.isfinite(surface)), strict=True):
        left, foot = frame.at((x.low + column * width, y.low + row * height))
        right, top = frame.at((x.low + (column + 1) * width, y.low + (row + 1) * height))
        shade = (surface[row, column] - low) / (high - low) if high > low else 0.5
        lost = 0.6 * float(doubt[row, column])
        across, upward = (right - left) * (1 - lost), (foot - top) * (1 - lost)
        corner = f'x="{left + (right - left) * lost / 2:.1f}" y="{top + (foot - top) * lost / 2:.1f}"'
        place = f'{corner} width="{across + 0.4:.1f}" height="{upward + 0.4:.1f}"'
        drawn.append(f'<rect class="cell" style="--shade:{shade:.2f}" {place}/>')
    drawn += [polyline(Line(path, color=2), frame)] if len(path) > 1 else []
    drawn += [_dot(dot, frame) for dot in dots]
    return frame.svg(title, "".join(drawn), x_label, x_names=scales[0].marks(x), y_names=scales[1].marks(y))


def smoothed(dots: Sequence[Dot], values: Sequence[float], x: Axis, y: Axis) -> NDArray[np.float64]:
    """[cells of y, cells of x]: the mean of the values near each cell, by a Gaussian kernel; NaN where none is near."""
    centres = (np.arange(_CELLS) + 0.5) / _CELLS
    places = np.array([(x.place(dot.x, 0, 1), y.place(dot.y, 0, 1)) for dot in dots])
    across, upward = (np.exp(-0.5 * ((centres[:, None] - places[:, side]) / _BANDWIDTH) ** 2) for side in (0, 1))
    weights = np.einsum("yn,xn->yxn", upward, across)
    total = weights.sum(axis=2)
    means: NDArray[np.float64] = np.where(total < _LEAST_WEIGHT, np.nan, weights @ np.asarray(values) / total)
    return means


def _dot(dot: Dot, frame: Frame) -> str:
    x, y = frame.at((dot.x, dot.y))
    kind = f"dot shade {color_class(dot.color)}{' hollow' if dot.hollow else ''}"
    title = f"<title>{escape(dot.label)}</title>"
    return f'<circle class="{kind}" style="--shade:{dot.shade:.2f}" cx="{x}" cy="{y}" r="4.5">{title}</circle>'


def _whisker(dot: Dot, frame: Frame) -> str:
    (x, low), (_, high) = frame.at((dot.x, dot.low)), frame.at((dot.x, dot.high))
    return f'<line class="bar-end {color_class(dot.color)}" x1="{x}" x2="{x}" y1="{low}" y2="{high}"/>'
