"""Charts that are no lines over steps: intervals, bars, parallel coordinates. Those of dots are in `dots`."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from pipelines.report.charts import Axis, axis, color_class, number, picture
from pipelines.report.statistics import Interval

WIDTH = 820
"""Width of a chart across the whole page, pixels."""
NARROW = 360
"""Width of such a chart on a telephone, where the names stand above their rows, pixels."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A value with its interval, in a row of an interval chart."""

    label: str
    interval: Interval
    color: int = 0
    hollow: bool = False
    """Drawn as a ring: the state before training."""


@dataclass(frozen=True, slots=True)
class IntervalChart:
    """Rows of values with their intervals: drawn on a page by `interval_chart`, in a paper by `figures`."""

    name: str
    """What files and scripts call it: `accuracy/held_out`."""
    title: str
    rows: Sequence[tuple[str, Sequence[Mark]]]
    share: bool
    """The values are shares."""


def interval_chart(
    rows: Sequence[tuple[str, Sequence[Mark]]], *, title: str, share: bool = False, narrow: bool = False
) -> Markup:
    """Rows of dots with whiskers over one shared scale.

    Args:
        rows: name of each and its marks, which stand one below the other.
        share: the values are shares, so the scale stays within 0 and 1.
        narrow: for a telephone; else as wide as the page.
    """
    marks = [mark for _, row in rows for mark in row]
    if not marks:
        return Markup("")
    ends = [end for mark in marks for end in (mark.interval.value, mark.interval.low, mark.interval.high) if end == end]
    width, row_height = (NARROW, 52) if narrow else (WIDTH, 34)
    left = 24 if narrow else 24 + min(320, max(7 * len(name) for name, _ in rows))
    scale, height = axis(ends, ticks=4 if narrow else 7), 46 + row_height * len(rows) + 18
    if share and (scale.low < 0 or scale.high > 1):
        scale = axis([min(max(end, 0.0), 1.0) for end in (scale.low, scale.high)], ticks=4 if narrow else 7)
    drawn = []
    for tick in scale.ticks:
        x = round(scale.place(tick, left, width - 24), 1)
        drawn.append(f'<line class="grid" x1="{x}" x2="{x}" y1="34" y2="{height - 26}"/>')
        drawn.append(f'<text class="mark" x="{x}" y="{height - 10}" text-anchor="middle">{number(tick)}</text>')
    for index, (name, row) in enumerate(rows):
        y = (72 if narrow else 56) + row_height * index
        place = f'x="{left}" y="{y - 18}"' if narrow else f'x="{left - 12}" y="{y + 4}" text-anchor="end"'
        drawn.append(f'<text class="name" {place}>{escape(_cut(name))}</text>')
        # A little apart, or overlapping intervals hide each other.
        places = [y + 8 * (place - (len(row) - 1) / 2) for place in range(len(row))]
        drawn.extend(_whisker(mark, scale, left, width - 24, at) for mark, at in zip(row, places, strict=True))
    return picture(title, "".join(drawn), width, height, kind="narrow" if narrow else "broad")


def for_every_width(chart: IntervalChart) -> Markup:
    """Rows of dots with whiskers for a telephone and for wider pages."""
    drawn = (
        interval_chart(chart.rows, title=chart.title, share=chart.share, narrow=narrow) for narrow in (False, True)
    )
    return Markup("").join(drawn)


def bar_chart(bars: Sequence[tuple[str, float]], *, title: str, unit: str = "") -> Markup:
    """Horizontal bars from 0, in the order given."""
    if not bars:
        return Markup("")
    width = 400
    left, most = 24 + min(230, max(7 * len(name) for name, _ in bars)), max(value for _, value in bars) or 1.0
    drawn = []
    for index, (name, value) in enumerate(bars):
        y, length = 32 + 26 * index, round(max(0.0, value) / most * (width - left - 64), 1)
        drawn.append(f'<text class="name" x="{left - 10}" y="{y + 12}" text-anchor="end">{escape(_cut(name))}</text>')
        drawn.append(f'<rect class="bar c0" x="{left}" y="{y}" width="{length}" height="16" rx="2"/>')
        drawn.append(f'<text class="mark" x="{left + length + 6}" y="{y + 12}">{number(value)}{escape(unit)}</text>')
    return picture(title, "".join(drawn), width, 40 + 26 * len(bars))


@dataclass(frozen=True, slots=True)
class ParallelAxis:
    """One vertical axis of a chart in parallel coordinates."""

    name: str
    places: Sequence[float]
    """Where each path crosses it, from 0 at the bottom to 1."""
    marks: Sequence[tuple[float, str]]
    """(place, text) beside it."""


def parallel_chart(parallel_axes: Sequence[ParallelAxis], shades: Sequence[float], *, title: str) -> Markup:
    """One path a trial across all parameters, the best drawn strongest. `shades`: from 0, the worst, to 1, the best."""
    if not parallel_axes or not shades:
        return Markup("")
    height, top, foot = 260, 58, 236
    gap = (WIDTH - 120) / max(1, len(parallel_axes) - 1)
    across = [60 + gap * index for index in range(len(parallel_axes))]
    drawn = []
    for path, shade in sorted(enumerate(shades), key=lambda pair: pair[1]):
        pixels = " ".join(
            f"{x:.1f},{foot - up.places[path] * (foot - top):.1f}" for x, up in zip(across, parallel_axes, strict=True)
        )
        drawn.append(f'<polyline class="path" style="--shade:{shade:.2f}" points="{pixels}"/>')
    last = len(parallel_axes) - 1
    for index, (x, up) in enumerate(zip(across, parallel_axes, strict=True)):
        drawn.append(f'<line class="upright" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{foot}"/>')
        # A long name stays on the picture at either end, and clear of its neighbours.
        start, anchor = (8.0, "start") if index == 0 else (WIDTH - 8.0, "end") if index == last else (x, "middle")
        height_of_name = top - 12 - 14 * (index % 2)
        drawn.append(
            f'<text class="name" x="{start:.1f}" y="{height_of_name}" text-anchor="{anchor}">{escape(up.name)}</text>'
        )
        for place, text in up.marks:
            y = foot - place * (foot - top) + 4
            drawn.append(f'<text class="mark halo" x="{x + 6:.1f}" y="{y:.1f}">{escape(text)}</text>')
    return picture(title, "".join(drawn), WIDTH, height, kind="wide")


def _whisker(mark: Mark, scale: Axis, left: float, right: float, y: float) -> str:
    value, kind = scale.place(mark.interval.value, left, right), color_class(mark.color)
    spread = ""
    if mark.interval.low == mark.interval.low:
        low, high = (scale.place(end, left, right) for end in (mark.interval.low, mark.interval.high))
        spread = f'<line class="whisker {kind}" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>'
    ring = " hollow" if mark.hollow else ""
    text = f"{mark.label}: {mark.interval.value:.3f} [{mark.interval.low:.3f}, {mark.interval.high:.3f}]"
    dot = f'<circle class="dot {kind}{ring}" cx="{value:.1f}" cy="{y}" r="5.5"><title>{escape(text)}</title></circle>'
    return spread + dot


def _cut(name: str) -> str:
    return name if len(name) <= 46 else f"{name[:45]}…"
