"""Reads the charts of a page as they are described in it."""

import html
import json
import re
from typing import Any

Spec = dict[str, Any]


def charts_of(text: str) -> list[Spec]:
    """Returns the charts of a page, in the language of Vega-Lite, in their order."""
    found = re.findall(
        r'<figure class="chart" role="img" aria-label="([^"]*)"><script type="application/json">(.*?)</script>', text
    )
    specs = [json.loads(spec) for _, spec in found]
    assert [html.unescape(label) for label, _ in found] == [spec["title"] for spec in specs]
    return specs


def chart_of(text: str, title: str) -> Spec:
    """Returns the last chart of that title, which is the one over steps."""
    return [spec for spec in charts_of(text) if spec["title"] == title][-1]


def texts_of(spec: Spec) -> list[str]:
    """Returns a chart's texts: those at its marks' pointers, and those written in it."""
    tables = [*spec["datasets"].values(), *(layer["data"].get("values", ()) for layer in spec["layer"])]
    return [str(row[name]) for table in tables for row in table for name in ("text", "name") if name in row]
