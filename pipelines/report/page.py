"""Fills the templates. The result is one self-contained page that fetches nothing."""

import re
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipelines.report.answer import figure, percent
from pipelines.report.charts import library
from pipelines.report.tokens import ENTROPY_LEVELS, RATIO_LEVELS
from specs.machine.files import replacing

_HERE = Path(__file__).parent
_IN_NO_PAGE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Control characters, characters that change the direction of text, surrogates, and non-characters. Recorded text
may have any of them."""
_CHART, _END = '<figure class="chart"', "</body>\n</html>"
"""Markup of a chart (`Chart.__html__`), and the end of a page. Recorded text is escaped, so that it contains
neither."""
_HEADING = re.compile(r"<h2>(.*?)</h2>", re.DOTALL)
_LEAST_HEADINGS = 4
"""A page with at least this many headings has a table of contents."""


def render(template: str, **values: Any) -> str:
    """Returns the page of a template in this directory, including the style sheet, scripts and the charts' library.
    U+FFFD replaces control characters in recorded text, because HTML cannot contain them."""
    page = (
        _environment()
        .get_template(template)
        .render(
            style=Markup((_HERE / "style.css").read_text(encoding="utf-8")),
            script=_script,
            written_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            version=_version(),
            percent=percent,
            shown_as=figure,
            ratio_levels=RATIO_LEVELS,
            entropy_levels=ENTROPY_LEVELS,
            **values,
        )
    )
    page = _IN_NO_PAGE.sub("\N{REPLACEMENT CHARACTER}", page)
    if _CHART in page:
        drawing = f'<script id="vega" type="text/plain">{library()}</script><script>{_script("charts.js")}</script>'
        page = f"{page.removesuffix(_END)}{drawing}\n{_END}"
    return page


def _script(name: str) -> Markup:
    return Markup((_HERE / name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {}  # keys in their order
    environment.filters["breakable"] = _breakable
    environment.filters["with_contents"] = _with_contents
    return environment


def _with_contents(body: str) -> Markup:
    """Returns a page's body with a table of contents under its header, if it has enough headings. Recorded text adds no
    headings, because its markup is escaped."""
    if len(_HEADING.findall(body)) < _LEAST_HEADINGS:
        return Markup(body)
    links: list[str] = []

    def linked(heading: re.Match[str]) -> str:
        links.append(f'<a href="#part-{len(links) + 1}">{heading[1]}</a>')
        return f'<h2 id="part-{len(links)}">{heading[1]}</h2>'

    head, end, rest = _HEADING.sub(linked, body).partition("</header>")
    return Markup(f'{head}{end}<nav class="contents">{" ".join(links)}</nav>{rest}')


def _breakable(text: str) -> Markup:
    """Returns a text that may be wrapped after the dots between its words, as in `objective.clip.high`."""
    return Markup("<wbr>").join(re.split(r"(?<=\.)(?=[^\W\d])", text))


def publish(path: Path, page: str) -> Path:
    """Writes a page atomically: a reader sees the old one or the new one, never half of one."""
    with replacing(path, durable=False) as aside:
        aside.write_text(page, encoding="utf-8")
    return path


def _version() -> str:
    try:
        return version("rpg-experiments")
    except PackageNotFoundError:
        return "(not installed)"
