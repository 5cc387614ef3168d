"""Line charts as inline SVG: a page of twenty weighs a few hundred kilobytes, opens offline and can be printed.

The lines that have a label carry it in `data-label`, the chart its axes in `data-axes`: from these and the pixels that
are drawn `hover.js` works out the values at the pointer, and `charts.js` those of a CSV file.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

Point = tuple[float, float]

PALETTE = 8
"""Colours in the style sheet; a chart of more lines uses them again."""
MOST_POINTS = 300
"""That one line is drawn with; of a longer one `thin` keeps those that make its shape."""
_MOST_FAINT_POINTS = 4000
"""Over all faint lines of a chart, so that a chart of a hundred lines is not much larger than one of ten."""
_LEAST_POINTS = 40
"""That a line keeps, however many lines share a chart."""
_MANY_BANDS = 4
"""More than these are shaded more weakly: where all overlap there is still something to see."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    points: Sequence[Point] | NDArray[np.float64]
    """Sorted by x. Points that are not finite are left out."""
    label: str = ""
    """Shown in the hover box, which leaves out lines without a label."""
    color: int = 0
    """Index into the palette of the style sheet."""
    faint: bool = False
    """Drawn thin and pale, behind the others: one seed of a group."""
    steps: bool = False
    """Drawn as stairs, as for the best value so far."""
    dots: bool = False
    """Drawn as separate points."""
    bands: Sequence[tuple[Sequence[Point], Sequence[Point]]] = ()
    """Lower and upper ends: the space between them is shaded. An interval of the values, or quantiles around them."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a shared x: drawn on a page by `line_chart`, in a paper by `figures`."""

    name: str
    """What files and scripts call it: `reward/mean`."""
    title: str
    lines: Sequence[Line]
    x_label: str = "step"


_ALIKE = 1e-9
"""Values that differ by a smaller share of their size are drawn as one: no marks between them would tell them apart."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values, and those that are marked on it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float, start: float, end: float) -> float:
        """The pixel of `value`, where `low` is at the pixel `start` and `high` at `end`."""
        return start + (value - self.low) / (self.high - self.low) * (end - start)


def axis(values: Sequence[float], *, ticks: int = 5) -> Axis:
    """A range that contains all values and ends on round numbers.

    Args:
        values: finite; may be empty.
        ticks: about how many marks it gets.
    Example:
        >>> axis([0.12, 0.87]).ticks
        (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low <= max(_ALIKE * max(abs(low), abs(high)), 1e-300):
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    rough = (high - low) / max(1, ticks - 1)
    scale = 10.0 ** math.floor(math.log10(rough))
    step = scale * next(nice for nice in (1, 2, 2.5, 5, 10) if nice * scale >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = tuple(float(f"{index * step:.12g}") for index in range(first, last + 1))
    return Axis(marks[0], marks[-1], marks)


def number(value: float) -> str:
    """A number as text that is short enough for an axis.

    Example:
        >>> number(0.25), number(12500.0), number(0.00002), number(3.0)
        ('0.25', '12.5k', '2e-05', '3')
    """
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    return f"{value / 1e3:.4g}k" if abs(value) >= 1e4 else f"{value:.4g}"


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str = "step",
    behind: "Callable[[Frame], str]" = lambda _frame: "",
    holds: Sequence[float] = (),
) -> Markup:
    """Lines over a shared x; empty where no line has a finite point.

    Args:
        behind: draws what lies behind the lines, e.g. what happened at which step.
        holds: values that the y axis reaches to also where no line does: those of charts that share a scale.
    """
    num_faint = sum(line.faint for line in lines)
    most_faint = max(_LEAST_POINTS, min(MOST_POINTS, _MOST_FAINT_POINTS // max(1, num_faint)))
    lines = [_thinned(line, most_faint if line.faint else MOST_POINTS) for line in lines]
    points = [point for line in lines for point in line.points]
    if not points:
        return Markup("")
    ends = [point for line in lines for band in line.bands for end in band for point in end]
    across = [x for x, _ in points]
    first, last = min(across), max(across)
    # From the first point to the last: round ends are for y alone.
    x = Axis(first, last if last > first else first + 1, axis(across, ticks=6).ticks)
    frame = Frame(x, axis([*(y for _, y in (*points, *ends)), *holds]))
    kind = "band weak" if sum(bool(line.bands) for line in lines) > _MANY_BANDS else "band"
    drawn = behind(frame) + "".join(_band(kind, line.color, band, frame) for line in lines for band in line.bands)
    drawn += "".join(polyline(line, frame) for line in sorted(lines, key=lambda line: not line.faint))
    return frame.svg(title, drawn, x_label, hover=any(line.label for line in lines))


@dataclass(frozen=True, slots=True)
class Frame:
    """The axes of a chart, and its measures in pixels."""

    x: Axis
    y: Axis
    width: int = 400
    height: int = 220
    left: int = 48
    right: int = 12
    top: int = 30
    bottom: int = 34

    def at(self, point: Point) -> Point:
        """The pixel of a point, to a hundredth: `hover.js` tells a step from its neighbours, and `charts.js` writes the
        values, by the pixels alone."""
        across = self.x.place(point[0], self.left, self.width - self.right)
        return round(across, 2), round(self.y.place(point[1], self.height - self.bottom, self.top), 2)

    def svg(
        self,
        title: str,
        drawn: str,
        x_label: str,
        *,
        hover: bool = False,
        x_names: Sequence[str] = (),
        y_names: Sequence[str] = (),
    ) -> Markup:
        """The whole chart: `drawn` with title, grid and marks.

        Args:
            hover: the values of the labelled lines are shown at the pointer.
            x_names: the marks of the axis, where they are not its numbers.
            y_names: the same of the other axis.
        """
        right, foot = self.width - self.right, self.height - self.bottom
        grid = "".join(
            f'<line class="grid" x1="{self.left}" x2="{right}" y1="{y}" y2="{y}"/>'
            f'<text class="mark" x="{self.left - 6}" y="{y + 3.5}" text-anchor="end">{escape(name)}</text>'
            for tick, name in zip(self.y.ticks, y_names or [number(tick) for tick in self.y.ticks], strict=True)
            if self.y.low <= tick <= self.y.high
            for y in [round(self.y.place(tick, foot, self.top), 1)]
        )
        names = x_names or [number(tick) for tick in self.x.ticks]
        marks = "".join(
            f'<text class="mark" x="{x}" y="{foot + 15}" text-anchor="middle">{escape(name)}</text>'
            for tick, name in zip(self.x.ticks, names, strict=True)
            if self.x.low <= tick <= self.x.high
            for x in [round(self.x.place(tick, self.left, right), 1)]
        )
        corner = f'<text class="mark" x="{right}" y="{self.height - 4}" text-anchor="end">{escape(x_label)}</text>'
        axes = (self.left, right, self.x.low, self.x.high, foot, self.top, self.y.low, self.y.high)
        named = f' data-axes="{" ".join(f"{end:.6g}" for end in axes)}" data-x="{escape(x_label)}"'
        attributes = named if hover else ""
        return picture(title, f"{grid}{marks}{corner}{drawn}", self.width, self.height, attributes=attributes)


def picture(title: str, drawn: str, width: int, height: int, *, kind: str = "", attributes: str = "") -> Markup:
    """An SVG element with its title. `kind`: a further class of the style sheet."""
    named = f'role="img" aria-label="{escape(title)}"{attributes}'
    heading = f'<text class="title" x="8" y="16">{escape(title)}</text>'
    return Markup(f'<svg class="chart {kind}" viewBox="0 0 {width} {height}" {named}>{heading}{drawn}</svg>')


def thin(points: ArrayLike, most: int = MOST_POINTS) -> NDArray[np.float64]:
    """The finite points [n, 2]; of more than `most` those that make the line's shape, peaks among them.

    Largest triangle three buckets: the points are dealt into buckets of neighbours. Of each bucket that point is kept
    which makes the largest triangle with the point kept before it and the mean of the next bucket.

    Source: Steinarsson 2013, Downsampling Time Series for Visual Representation, ch. 4.2.
    """
    table: NDArray[np.float64] = np.asarray(points, dtype=float).reshape(-1, 2)
    table = table[np.isfinite(table).all(axis=1)]
    if len(table) <= most:
        return table
    edges = np.linspace(1, len(table) - 1, most - 1).astype(int)
    kept = [0]
    for start, end, following in zip(edges, edges[1:], [*edges[2:], len(table)], strict=False):
        x, y = table[kept[-1]]
        next_x, next_y = table[end:following].mean(axis=0)
        areas = np.abs((x - next_x) * (table[start:end, 1] - y) - (x - table[start:end, 0]) * (next_y - y))
        kept.append(start + int(areas.argmax()))
    shape: NDArray[np.float64] = table[[*kept, len(table) - 1]]
    return shape


def color_class(index: int) -> str:
    """The style sheet's class for an index into the palette, which repeats."""
    return f"c{index % PALETTE}"


def polyline(line: Line, frame: Frame) -> str:
    """A line in the frame of a chart."""
    pixels = [frame.at((x, y)) for x, y in line.points]
    kind = f"{color_class(line.color)}{' faint' if line.faint else ''}"
    label = f' data-label="{escape(line.label)}"' if line.label else ""
    if line.dots or len(pixels) == 1:
        radius = 2 if line.faint else 3.5
        dots = "".join(f'<circle class="dot {kind}" cx="{x:g}" cy="{y:g}" r="{radius}"/>' for x, y in pixels)
        return f"<g{label}>{dots}</g>"
    if line.steps:
        corners = [corner for one, two in itertools.pairwise(pixels) for corner in ((two[0], one[1]), two)]
        pixels = [pixels[0], *corners]
    return f'<polyline class="line {kind}"{label} points="{_joined(pixels)}"/>'


def _thinned(line: Line, most: int) -> Line:
    bands = [(_points(thin(low, most)), _points(thin(high, most))) for low, high in line.bands]
    return replace(line, points=_points(thin(line.points, most)), bands=bands)


def _points(table: NDArray[np.float64]) -> list[Point]:
    return [(x, y) for x, y in table.tolist()]


def _band(kind: str, color: int, band: tuple[Sequence[Point], Sequence[Point]], frame: Frame) -> str:
    lower, upper = band
    corners = [frame.at(point) for point in (*lower, *reversed(upper))]
    return f'<polygon class="{kind} {color_class(color)}" points="{_joined(corners)}"/>' if corners else ""


def _joined(pixels: Sequence[Point]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in pixels)
