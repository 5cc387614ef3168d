"""Recorded text for a table cell in another program: a spreadsheet, or a Markdown renderer."""

import re

_FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""Characters that make a spreadsheet read a text as a formula if it begins with one. The last four are the wide forms
of = + - @."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def spreadsheet_cell(text: str) -> str:
    """Returns the text, preceded by an apostrophe if a spreadsheet would compute it. A number stays a number.

    >>> [spreadsheet_cell(text) for text in ("=1+1", "-1.5e-3", "-1.5 [-2, -1]", "a=1")]
    ["'=1+1", '-1.5e-3', "'-1.5 [-2, -1]", 'a=1']
    """
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def markdown_cell(text: str) -> str:
    """Returns the text as Markdown for one cell, without HTML, cell separators and line breaks.

    >>> markdown_cell("a | <b>")
    'a \\\\| &lt;b&gt;'
    """
    plain = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return " ".join(re.sub(r"(\\*)\|", r"\1\1\\|", plain).splitlines())
