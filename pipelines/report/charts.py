"""Charts in Vega-Lite. Each is described once: pages draw it in the browser, papers get it as SVG, PDF and PNG.

A colour is a variable of the style sheet, so a chart follows a page's light and dark colours; a paper has the light
ones. Each page contains the drawing library, see `library`, and opens offline.
"""

import json
import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from gzip import compress
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specs.machine.files import replacing, versions_of
from specs.machine.own_cache import place_to_save_time

Layer = dict[str, Any]
"""A layer of a chart, or a part of one, in Vega-Lite."""
Row = dict[str, Any]
"""A row of a table that layers draw. A list in it stands for a column with several rows."""
Point = tuple[float, float]
Width = Literal["column", "page"]
_SIZES: dict[Width, tuple[int, int]] = {"column": (312, 194), "page": (648, 272)}
"""Widths in pixels (96 per inch) and heights of line charts: for one column of a two-column page, 3.25 inches, and for
the whole page, 6.75 inches. Conferences and journals use these sizes."""
KINDS = ("svg", "pdf", "png")
PALETTE = 8
"""Number of colours in the style sheet. A chart with more lines repeats them."""
MOST_POINTS = 300
"""Largest number of points of one line; `thin` keeps those of a longer line that preserve its shape."""
_MOST_FAINT_POINTS = 4000
"""Largest number of points over all faint lines of a chart, so that a chart of a hundred lines is not much larger than
a chart of ten."""
_LEAST_POINTS = 40
"""Smallest number of points of a line, however many lines a chart has."""
_MANY_BANDS = 4
"""Number of bands above which they are shaded more weakly, so that overlapping ones stay visible."""
_ALIKE = 1e-9
"""Relative difference below which values are drawn as equal, because no marks on the axis would distinguish them."""
_BANDS = (("low", "high"), ("low2", "high2"))
"""Names of the columns with a line's bands."""
_FIGURES = {"type": "quantitative"}
_AXIS = {"domain": False, "ticks": False, "titleAnchor": "end", "titleFontWeight": "normal"}
_LOOK: Layer = {
    "aria": False,  # the title labels the whole chart; labels of each mark would be as large as the data
    "font": "system-ui, Segoe UI, Helvetica, Arial, sans-serif",  # as in the style sheet
    "view": {"stroke": None},
    "axis": _AXIS | {"labelColor": "var(--soft)", "titleColor": "var(--soft)", "gridColor": "var(--rule)"},
    "axisX": {"grid": False, "labelSeparation": 8, "tickCount": 6},
    "title": {"anchor": "start", "color": "var(--ink)", "frame": "bounds", "fontSize": 12},
    "legend": {
        "labelColor": "var(--ink)",
        "labelLimit": 0,
        "offset": 4,
        "orient": "bottom",
        "title": None,
        "titleColor": "var(--soft)",
        "titleFontWeight": "normal",
    },
    "text": {"color": "var(--ink)"},
    "rule": {"color": "var(--soft)"},
}


@dataclass(frozen=True, slots=True, repr=False)
class Chart:
    """A picture of values. A page and a notebook show it directly."""

    title: str
    """Title in words."""
    layers: Sequence[Layer]
    data: Mapping[str, Sequence[Row]]
    """Tables that the layers draw: `lines` with rows of `line`, `marks` with rows of `mark`, or others."""
    x: Layer
    """The x encoding that all layers share: title, scale, axis."""
    y: Layer
    height: int = 190
    """Height in pixels on a page, with title and axes."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of the drawn table -> column of the chart's data."""
    name: str = ""
    """The chart's name in scripts and files: `reward/mean`, `accuracy/held_out`."""
    key: str = ""
    """The field whose values label the lines, for the legend: `clip.high`."""

    def __repr__(self) -> str:
        return f"<chart {self.name}: {self.title}>"

    def over(self, layers: Sequence[Layer]) -> "Chart":
        """Returns the chart with these layers behind its own."""
        return replace(self, layers=[*layers, *self.layers])

    def rows(self) -> list[Row]:
        """Returns the data: a row for each point of a line, or for each value with its interval."""
        found: list[Row] = []
        for row in self.data.get("lines") or self.data["marks"]:
            named = {name: row[column] for column, name in self.columns.items() if column in row}
            lists = {name: value for name, value in named.items() if isinstance(value, list)}
            found += (named | dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True))
            found += [] if lists else [named]
        return found

    def spec(self, width: Width | None = None) -> dict[str, Any]:
        """Returns the chart in Vega-Lite.

        Args:
            width: width on paper, in light colours; None fills the width on a page, in colours of the style sheet.
        """
        lines = self.data.get("lines", ())
        spec = {
            "title": self.title,
            "width": "container",
            "height": self.height,
            "padding": 2,
            "background": None,
            "autosize": {"type": "fit", "contains": "padding"},
            "datasets": {**self.data, **({"lines": _drawn(lines)} if lines else {})},
            "encoding": {"x": _FIGURES | self.x, "y": _FIGURES | {"title": None} | self.y},
            "layer": self.layers,
            "config": _LOOK,
        }
        if width:
            across, height = _SIZES[width]
            spec |= {"title": wrap(self.title, across // 7), "width": across, "background": "white"}
            spec |= {"layer": [*self.layers, *_legend(lines, across, self.key)]}
            spec |= {"height": height} if lines else {}
            spec = json.loads(re.sub(r"var\((--\w+)\)", lambda name: light_colors()[name[1]], json.dumps(spec)))
        return spec

    def svg(self, width: Width = "column") -> str:
        """Returns the chart as SVG text."""
        import vl_convert

        drawn = vl_convert.vegalite_to_svg(self.spec(width))
        return drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(self.title)}" ', 1)

    def save(self, path: str | Path, width: Width = "column") -> Path:
        """Writes the chart. The suffix of the name sets the format: .svg, .pdf or .png."""
        import vl_convert

        path, text = Path(path), self.svg(width)
        # The converter counts a pixel as a point.
        in_points = re.sub(
            r'(width|height)="([\d.]+)"', lambda side: f'{side[1]}="{0.75 * float(side[2])}"', text, count=2
        )
        match path.suffix:
            case ".svg":
                drawn = text.encode()
            case ".pdf":
                drawn = vl_convert.svg_to_pdf(in_points)
            case ".png":
                drawn = vl_convert.svg_to_png(in_points, ppi=300)
            case _:
                kinds = ", ".join(f".{kind}" for kind in KINDS)
                raise ValueError(f"a figure is saved as {kinds}, not as {path.name!r}")
        with replacing(path, durable=False) as aside:
            aside.write_bytes(drawn)
        return path

    def __html__(self) -> str:
        text = json.dumps(self.spec(), separators=(",", ":"), allow_nan=False).replace("<", r"\u003c")
        drawn = f'<script type="application/json">{text}</script>'
        return f'<figure class="chart" role="img" aria-label="{escape(self.title)}">{drawn}</figure>'

    def _repr_svg_(self) -> str:
        return self.svg("page")


def line(
    points: ArrayLike,
    label: str = "",
    color: int = 0,
    *,
    faint: bool = False,
    steps: bool = False,
    dots: bool = False,
    bands: Sequence[tuple[ArrayLike, ArrayLike]] = (),
) -> Row:
    """Returns one line of a chart.

    Args:
        points: [n, 2], sorted by x. Non-finite ones are left out.
        label: shown in the hover box, which leaves out lines without a label.
        color: index into the palette of the style sheet.
        faint: drawn thin and pale, behind the others: one seed of a group.
        steps: drawn as stairs, for example the best value so far.
        dots: drawn as separate points.
        bands: lower and upper values at each point: the space between is shaded. An interval, or quantiles.
    """
    ends = [np.asarray(end, dtype=float) for band in bands for end in band]
    table = np.column_stack([np.asarray(points, dtype=float).reshape(-1, 2), *ends])
    table = table[np.isfinite(table[:, :2]).all(axis=1)]
    if steps:
        table = np.column_stack([np.repeat(table[:, 0], 2)[1:], np.repeat(table[:, 1:], 2, axis=0)[:-1]])
    columns = zip(["x", "y", *(end for pair in _BANDS[: len(bands)] for end in pair)], table.T.tolist(), strict=True)
    strokes = {"opacity": 0.33, "stroke": 1} if faint else {"opacity": 1, "stroke": 2}
    return {"line": label, "color": ink(color), "dots": dots or len(table) == 1, **strokes, **dict(columns)}


def line_chart(
    lines: Sequence[Row],
    *,
    title: str,
    name: str = "",
    key: str = "",
    x_label: str = "step",
    holds: Sequence[float] = (),
) -> Chart | None:
    """Returns lines over a shared x; None if no line has a finite point.

    Args:
        key: the field of which the lines' labels are values.
        holds: values that the y axis includes even if no line reaches them: those of charts with a shared scale.
    """
    lines = [line for line in lines if line["x"]]
    if not lines:
        return None
    upward = [value for line in lines for name in ("y", *sum(_BANDS, ())) for value in line.get(name, ())]
    return Chart(
        title,
        line_layers(lines),
        {"lines": lines},
        # From the first point to the last: only y has round ends.
        x={"title": x_label, "scale": {"domain": extent([line["x"][end] for line in lines for end in (0, -1)])}},
        y={"scale": {"domain": extent([*upward, *holds]), "nice": True}},
        columns={"line": "line", "x": x_label, "y": "value", "low": "low", "high": "high"},
        name=name,
        key=key,
    )


def line_layers(lines: Sequence[Row]) -> list[Layer]:
    """Returns the layers that draw the table of lines."""
    if not lines:
        return []
    counts, dots = [sum(low in line for line in lines) for low, _ in _BANDS], any(line["dots"] for line in lines)
    area = {"type": "area", "fillOpacity": 0.06 if counts[0] > _MANY_BANDS else 0.14}
    strokes = {"type": "line", "strokeJoin": "round", "strokeWidth": {"expr": "datum.stroke"}}
    return [
        *(
            layer("lines", area, "x", low, high, only=f"isValid(datum.{low})", y=low, y2=high)
            for (low, high), count in zip(_BANDS, counts, strict=True)
            if count
        ),
        layer("lines", strokes, "x", "y", only="!datum.dots", opacity=as_it_is("opacity")),
        *([layer("lines", {"type": "point", "filled": True}, "x", "y", only="datum.dots")] if dots else []),
    ]


def layer(table: str, mark: Layer, *lists: str, only: str = "", **shown: str | Layer) -> Layer:
    """Returns a layer that draws a mark for each row of a table, in the row's colour unless the mark has its own.

    Args:
        lists: columns that are lists.
        only: condition on the rows that are drawn.
        shown: channels of the mark besides x and y: a column, or a Vega-Lite encoding.
    """
    shown = {"x": "x", "y": "y"} | ({} if "color" in mark else {"color": as_it_is("color")}) | shown
    if mark["type"] in ("line", "area"):
        # Without an order column a line would be drawn by x.
        shown |= {"detail": {"field": "id", "type": "nominal"}, "order": {"value": None}}
    return {
        "data": {"name": table},
        "transform": [*([{"filter": only}] if only else ()), *([{"flatten": lists}] if lists else ())],
        "mark": mark,
        "encoding": {channel: {"field": what} if isinstance(what, str) else what for channel, what in shown.items()},
    }


def as_it_is(column: str) -> Layer:
    """Returns the encoding of a column whose values, colours or opacities, are used unchanged."""
    return {"field": column, "type": "quantitative" if column == "opacity" else "nominal", "scale": None}


def ink(color: int) -> str:
    """Returns the style sheet's colour for an index into the palette, which repeats beyond its end."""
    return f"var(--c{color % PALETTE})"


def extent(values: ArrayLike) -> list[float]:
    """Returns the ends of a range that contains the finite values.

    Example:
        >>> extent([0.12, float("nan"), 0.87]), extent([3.0]), extent([])
        ([0.12, 0.87], [1.5, 4.5], [0.0, 1.0])
    """
    found = np.asarray(values, dtype=float)
    found = found[np.isfinite(found)]
    low, high = (float(found.min()), float(found.max())) if found.size else (0.0, 1.0)
    if high - low <= max(_ALIKE * max(abs(low), abs(high)), 1e-300):
        return [low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)]
    return [low, high]


def number(value: float) -> str:
    """Returns a number as text that is short enough for an axis.

    Example:
        >>> number(0.25), number(12500.0), number(0.00002), number(3.0)
        ('0.25', '12.5k', '2e-05', '3')
    """
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    return f"{value / 1e3:.4g}k" if abs(value) >= 1e4 else f"{value:.4g}"


def thin(points: ArrayLike, most: int = MOST_POINTS) -> NDArray[np.float64]:
    """Returns the rows [n, 2 or more] whose first two columns, x and y, are finite. If there are more than `most`,
    returns those that preserve the line's shape, including peaks.

    Largest triangle three buckets: the points are divided into buckets of neighbours. From each bucket the point is
    kept that makes the largest triangle with the previously kept point and the mean of the next bucket.

    Source: Steinarsson 2013, Downsampling Time Series for Visual Representation, ch. 4.2.
    """
    table: NDArray[np.float64] = np.asarray(points, dtype=float)
    table = table[np.isfinite(table[:, :2]).all(axis=1)]
    if len(table) <= most:
        return table
    edges = np.linspace(1, len(table) - 1, most - 1).astype(int)
    kept = [0]
    for start, end, following in zip(edges, edges[1:], [*edges[2:], len(table)], strict=False):
        x, y = table[kept[-1], :2]
        next_x, next_y = table[end:following, :2].mean(axis=0)
        areas = np.abs((x - next_x) * (table[start:end, 1] - y) - (x - table[start:end, 0]) * (next_y - y))
        kept.append(start + int(areas.argmax()))
    shape: NDArray[np.float64] = table[[*kept, len(table) - 1]]
    return shape


@cache
def light_colors() -> dict[str, str]:
    """Returns the colours of a page on white, by their names in the style sheet."""
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    return dict(re.findall(r"(--\w+): (#\w+);", style[: style.index("}")]))


@cache
def library() -> str:
    """Returns Vega and Vega-Lite as one script, compressed, in base64.

    Bundling them takes a second or two, so the user's own cache directory keeps the script.
    """
    import vl_convert

    path = place_to_save_time("charts", f"vega-{versions_of('vl-convert-python')['vl-convert-python']}.txt")
    if path is not None and path.is_file():
        return path.read_text(encoding="ascii")
    text = b64encode(compress(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").encode(), mtime=0)).decode()
    if path is not None:
        with replacing(path, durable=False) as aside:
            aside.write_text(text, encoding="ascii")
    return text


def short(values: Sequence[float] | NDArray[np.float64]) -> list[float | None]:
    """Returns values with as many digits as are visible, so that a page stays small; None for a NaN."""
    low, high = extent(values)
    digits = 4 - math.floor(math.log10(min(high - low, 1e300)))
    rounded = (round(float(value), digits) for value in values)
    return [int(v) if v.is_integer() and abs(v) < 1e15 else v if math.isfinite(v) else None for v in rounded]


def _drawn(lines: Sequence[Row]) -> list[Row]:
    """Returns the table of lines as it is drawn: faint lines first, long lines thinned."""
    num_faint = sum(line["opacity"] < 1 for line in lines)
    most_faint = max(_LEAST_POINTS, min(MOST_POINTS, _MOST_FAINT_POINTS // max(1, num_faint)))
    found = []
    for place, line in enumerate(sorted(lines, key=lambda line: float(line["opacity"]))):
        names = [name for name, value in line.items() if isinstance(value, list)]
        table = thin(np.array([line[name] for name in names]).T, MOST_POINTS if line["opacity"] == 1 else most_faint)
        found.append({**line, "id": place, **{name: short(c) for name, c in zip(names, table.T, strict=True)}})
    return found


def _legend(lines: Sequence[Row], across: float, key: str) -> list[Layer]:
    """Returns a layer that draws only the legend of the lines, if several lines have a label."""
    colors = {line["line"]: line["color"] for line in lines if line["line"]}
    if len(colors) < 2:
        return []
    # The longest label determines the number of columns.
    shown = {
        "symbolType": "stroke",
        "symbolOpacity": 1,
        "title": key or None,
        "columns": max(1, int(across / (40 + 6.5 * max(map(len, colors))))),
    }
    scale = {"domain": list(colors), "range": list(colors.values())}
    color = {"field": "label", "type": "nominal", "scale": scale, "legend": shown}
    labels = [{"label": label} for label in colors]
    return [{"data": {"values": labels}, "mark": {"type": "point", "size": 0}, "encoding": {"color": color}}]
