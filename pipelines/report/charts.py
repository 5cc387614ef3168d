"""Line charts as inline SVG: a page of twenty weighs a few hundred kilobytes, opens offline and can be printed.

The attribute `data-hover` holds the points of the lines that have a label: `hover.js` shows the values at the pointer.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from markupsafe import Markup

Point = tuple[float, float]

PALETTE = 8
"""Colours in the style sheet; a chart of more lines uses them again."""
MOST_POINTS = 240
"""That one line is drawn with; a line of more is averaged in bins of neighbours."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    points: Sequence[Point]
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
    band: tuple[Sequence[Point], Sequence[Point]] = ((), ())
    """The lower and the upper ends of the values' intervals: the space between them is shaded."""


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
    if low == high:
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


def line_chart(lines: Sequence[Line], *, title: str, x_label: str = "step") -> Markup:
    """Lines over a shared x; empty where no line has a finite point."""
    lines = [replace(line, points=thin(line.points), band=(thin(line.band[0]), thin(line.band[1]))) for line in lines]
    points = [point for line in lines for point in line.points]
    if not points:
        return Markup("")
    ends = [point for line in lines for end in line.band for point in end]
    across = [x for x, _ in points]
    first, last = min(across), max(across)
    # From the first point to the last: round ends are for y alone.
    x = Axis(first, last if last > first else first + 1, axis(across, ticks=6).ticks)
    frame = Frame(x, axis([y for _, y in (*points, *ends)]))
    drawn = "".join(_band(line, frame) for line in lines)
    drawn += "".join(polyline(line, frame) for line in sorted(lines, key=lambda line: not line.faint))
    return frame.svg(title, drawn, x_label, hover=_hover(lines, frame))


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
        """The pixel of a point."""
        across = self.x.place(point[0], self.left, self.width - self.right)
        return round(across, 1), round(self.y.place(point[1], self.height - self.bottom, self.top), 1)

    def svg(
        self,
        title: str,
        drawn: str,
        x_label: str,
        *,
        hover: str = "",
        x_names: Sequence[str] = (),
        y_names: Sequence[str] = (),
    ) -> Markup:
        """The whole chart: `drawn` with title, grid and marks. Names: the marks of an axis, where not its numbers."""
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
        return picture(title, f"{grid}{marks}{corner}{drawn}", self.width, self.height, attributes=hover)


def picture(title: str, drawn: str, width: int, height: int, *, kind: str = "", attributes: str = "") -> Markup:
    """An SVG element with its title. `kind`: a further class of the style sheet."""
    named = f'role="img" aria-label="{escape(title)}"{attributes}'
    heading = f'<text class="title" x="8" y="16">{escape(title)}</text>'
    return Markup(f'<svg class="chart {kind}" viewBox="0 0 {width} {height}" {named}>{heading}{drawn}</svg>')


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """The finite points, averaged in bins of neighbours where there are more than `most`."""
    finite = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
    if len(finite) <= most:
        return finite
    size = math.ceil(len(finite) / most)
    bins = [finite[start : start + size] for start in range(0, len(finite), size)]
    return [(sum(p[0] for p in part) / len(part), sum(p[1] for p in part) / len(part)) for part in bins]


def color_class(index: int) -> str:
    """The style sheet's class for an index into the palette, which repeats."""
    return f"c{index % PALETTE}"


def _band(line: Line, frame: Frame) -> str:
    lower, upper = line.band
    corners = " ".join(f"{x},{y}" for x, y in map(frame.at, (*lower, *reversed(upper))))
    return f'<polygon class="band {color_class(line.color)}" points="{corners}"/>' if corners else ""


def polyline(line: Line, frame: Frame) -> str:
    """A line in the frame of a chart."""
    pixels = [frame.at(point) for point in line.points]
    kind = f"{color_class(line.color)}{' faint' if line.faint else ''}"
    if line.dots or len(pixels) == 1:
        return "".join(
            f'<circle class="dot {kind}" cx="{x}" cy="{y}" r="{2 if line.faint else 3.5}"/>' for x, y in pixels
        )
    if line.steps:
        corners = [corner for one, two in itertools.pairwise(pixels) for corner in ((two[0], one[1]), two)]
        pixels = [pixels[0], *corners]
    return f'<polyline class="line {kind}" points="{" ".join(f"{x},{y}" for x, y in pixels)}"/>'


def _hover(lines: Sequence[Line], frame: Frame) -> str:
    shown = [
        {
            "label": line.label,
            "color": color_class(line.color),
            "points": [[*frame.at(p), _short(p[0]), _short(p[1])] for p in line.points],
        }
        for line in lines
        if line.label and line.points
    ]
    return f' data-hover="{escape(json.dumps(shown, separators=(",", ":")))}"' if shown else ""


def _short(value: float) -> float:
    return float(f"{value:.5g}")
