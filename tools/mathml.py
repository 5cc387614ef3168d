"""Equations of the documentation: a fenced block `math` becomes MathML, which browsers draw without a script."""

from typing import Any

from latex2mathml.converter import convert


def equation(source: str, *_: Any, **__: Any) -> str:
    """The element that stands in the page for a block of TeX; called by pymdownx.superfences."""
    return f'<div class="equation">{convert(source.strip(), display="block")}</div>'
