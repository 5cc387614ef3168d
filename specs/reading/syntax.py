"""Explanation of a YAML parser's errors by plain messages, at the line of the cause.

The parser stops at the first character that cannot continue the text. That is often some lines after the mistake: a
brace that is never closed shows at the next key.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.tokens import (
    AliasToken,
    AnchorToken,
    DirectiveToken,
    DocumentEndToken,
    DocumentStartToken,
    ScalarToken,
    TagToken,
)

_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""Pattern of the parser's line ends."""
_BETWEEN = (DirectiveToken, DocumentEndToken, DocumentStartToken)
_NO_VALUE = (AliasToken, AnchorToken, TagToken)
_CLOSING = {"{": "}", "[": "]"}
_IN_QUOTES = 'put the text in quotes: "..."'
_COLUMNS = "entries of one section begin at the same column"


@dataclass(frozen=True, slots=True)
class SyntaxMistake:
    """The reason why a text is not YAML."""

    line: int
    """Line of the cause, from 1."""
    message: str
    hint: str = ""
    """Text to write instead."""


def is_whole_value(text: str) -> bool:
    """Returns whether a text is one YAML value from its beginning to its end.

    False if it is not YAML, if a part of it is a comment, an anchor, an alias, a tag or a separator of documents
    (`Which is #1?`, `&mine`, `{prompt} =`), or if it has several lines without quotes, which YAML would join.
    """
    try:
        for _ in YAML(typ="safe", pure=True).parse(text):
            pass
        tokens = [token for token in _tokens(text) if token.end_mark.index > token.start_mark.index]
    except MarkedYAMLError:
        return False
    except (YAMLError, RecursionError):  # for example a forbidden character, which no text may have either
        return True
    if not tokens:
        return not text.strip()
    first, last = tokens[0], tokens[-1]
    is_cut = isinstance(first, _NO_VALUE) or any(isinstance(token, _BETWEEN) for token in tokens)
    if isinstance(first, ScalarToken) and not first.style:
        is_cut |= len(tokens) == 1 and "\n" in text.strip()
    elif isinstance(first, ScalarToken) and first.style in ("|", ">"):
        is_cut |= "\n" not in text.strip()
    return not (is_cut or text[last.end_mark.index :].strip())


def explain(error: MarkedYAMLError, text: str) -> SyntaxMistake:
    """Returns the mistake behind a parser's error in a text."""
    complaint = _Complaint(error, text)
    explanations = (_tab, _quote, _bracket, _block, _key, _colon, _item, _character)
    mistakes = (mistake for each in explanations if (mistake := each(complaint)))
    fallback = SyntaxMistake(complaint.line + 1, f"not valid YAML: {error.problem or error.context}")
    return next(mistakes, fallback)


class _Complaint:
    """A parser's error: its message and place, with lines and columns from 0."""

    def __init__(self, error: MarkedYAMLError, text: str) -> None:
        mark = error.problem_mark or error.context_mark
        begun = error.context_mark or mark
        self.text = text
        self.lines = [*_LINE_BREAK.split(text), ""]
        self.problem = str(error.problem or "")
        self.context = str(error.context or "")
        self.line: int = mark.line if mark else 0
        self.column: int = mark.column if mark else 0
        self.begun_line: int = begun.line if begun else 0
        self.begun_column: int = begun.column if begun else 0
        """Column at which the unfinished part begins."""

    def sign(self, line: int, column: int) -> str:
        """Returns the character at a place; empty at the end of a line."""
        return self.lines[line][column : column + 1]

    def indent(self, line: int) -> int:
        """Returns the number of spaces at the beginning of a line."""
        return len(self.lines[line]) - len(self.lines[line].lstrip(" "))

    def line_before(self, line: int) -> int:
        """Returns the number of the last line before this one that is neither empty nor a comment, or this one's if
        there is no such line."""
        said = [number for number in range(line) if self.lines[number].split("#")[0].strip()]
        return said[-1] if said else line


def _tab(complaint: _Complaint) -> SyntaxMistake | None:
    if "character '\\t'" not in complaint.problem:
        return None
    return SyntaxMistake(complaint.line + 1, "a tab: YAML allows only spaces", "write spaces in its place")


def _quote(complaint: _Complaint) -> SyntaxMistake | None:
    """Explains a quote that is not closed or closes too early, or an unknown escape in double quotes."""
    if "quoted scalar" in complaint.context:
        if "escape character" in complaint.problem:
            escape = f"\\{complaint.sign(complaint.line, complaint.column)}"
            hint = "write the backslash twice, or use '...', which has no escapes"
            return SyntaxMistake(complaint.line + 1, f'"..." has no escape `{escape}`', hint)
        return _never_closed(complaint, complaint.begun_line, complaint.begun_column)
    quoted = _quoted_before(complaint)
    if quoted is None or quoted.end_mark.line < complaint.line:
        return None
    if quoted.start_mark.line < quoted.end_mark.line:  # the quote that ends it was meant to begin another text
        return _never_closed(complaint, quoted.start_mark.line, quoted.start_mark.column)
    if "<scalar>" not in complaint.problem:
        return None
    hint = "inside '...' write the quote twice, or take \"...\"" if quoted.style == "'" else 'inside "..." write \\"'
    return SyntaxMistake(complaint.line + 1, f"there is text after the closing `{quoted.style}`", hint)


def _never_closed(complaint: _Complaint, line: int, column: int) -> SyntaxMistake:
    opening = complaint.sign(line, column)
    closing = _CLOSING.get(opening, opening)
    return SyntaxMistake(line + 1, f"the `{opening}` is never closed", f"a `{closing}` is missing")


def _quoted_before(complaint: _Complaint) -> ScalarToken | None:
    """Returns the quoted text that ends right before the place at which the parser stopped."""
    last = None
    try:
        for token in _tokens(complaint.text):
            if (token.start_mark.line, token.start_mark.column) >= (complaint.line, complaint.column):
                break
            last = token
    except YAMLError:
        pass
    return last if isinstance(last, ScalarToken) and last.style in ("'", '"') else None


def _tokens(text: str) -> Iterator[ScalarToken]:
    yield from YAML(typ="safe", pure=True).scan(text)


def _bracket(complaint: _Complaint) -> SyntaxMistake | None:
    """Explains a brace or bracket that is not closed, a missing comma inside, or text after it."""
    if not complaint.problem.startswith("expected ',' or "):
        return None
    begun, here = complaint.begun_line, complaint.line
    if "<stream end>" in complaint.problem or (here > begun and complaint.indent(here) <= complaint.indent(begun)):
        return _never_closed(complaint, begun, complaint.begun_column)
    if complaint.problem.endswith("got ':'"):
        key = complaint.lines[here][: complaint.column].rpartition(" ")[2]
        return SyntaxMistake(here + 1, "a comma is missing between two entries", f"write it before `{key or ':'}`")
    return _after_bracket(complaint)


def _after_bracket(complaint: _Complaint) -> SyntaxMistake:
    end = complaint.lines[complaint.line][: complaint.column].rstrip()[-1:]
    return SyntaxMistake(complaint.line + 1, f"there is text after the closing `{end}`", _IN_QUOTES)


def _block(complaint: _Complaint) -> SyntaxMistake | None:
    """Explains the error that YAML expected the next entry or the end of a section, and found other text."""
    if not complaint.problem.startswith("expected <block end>"):
        return None
    what, line = complaint.problem.removeprefix("expected <block end>, but found ").strip("'"), complaint.line + 1
    if what in ("}", "]"):
        return SyntaxMistake(line, f"a `{what}` without an opening bracket", "remove it, or add the opening bracket")
    if what == "<scalar>":
        return _after_bracket(complaint)
    if what == "-":
        return SyntaxMistake(line, "an item of a list among keys", "indent it under the key that it belongs to")
    if what == "?":
        return SyntaxMistake(line, "a key among the items of a list", _COLUMNS)
    return SyntaxMistake(line, "the indentation matches no line above", _COLUMNS)


def _key(complaint: _Complaint) -> SyntaxMistake | None:
    """Explains a line that is not `key: value`."""
    if "simple key" not in complaint.context:
        return None
    return _no_key(complaint, complaint.begun_line)


def _no_key(complaint: _Complaint, line: int) -> SyntaxMistake:
    text = complaint.lines[line].split(" #")[0].strip().removeprefix("- ").strip()
    key, colon, value = text.partition(":")
    if colon:
        return SyntaxMistake(line + 1, "a space is missing after the colon", f"write `{key}: {value.strip()}`")
    key, _, value = text.partition(" ")
    written = f"{key}: {value.strip()}".strip()
    return SyntaxMistake(line + 1, f"a colon is missing after `{key}`", f"write `{written}`")


def _colon(complaint: _Complaint) -> SyntaxMistake | None:
    """Explains a misplaced colon: in a text, or in a line that is indented under a value."""
    if complaint.problem != "mapping values are not allowed here":
        return None
    line, before = complaint.line, complaint.line_before(complaint.line)
    if item := re.match(r"-[^\s-].*", complaint.lines[line].lstrip(" ")):
        return SyntaxMistake(line + 1, "a space is missing after the dash", f"write `- {item[0][1:]}`")
    if re.search(r":\s", complaint.lines[line][: complaint.column]):
        return SyntaxMistake(line + 1, "a second `: ` in the line", _IN_QUOTES)
    if complaint.indent(line) <= complaint.indent(before):
        return _no_key(complaint, before)
    return SyntaxMistake(line + 1, f"indented under line {before + 1}, which has a value already", _COLUMNS)


def _item(complaint: _Complaint) -> SyntaxMistake | None:
    """Explains a list that begins on the line of its key, and a text that begins on the line of its `|`."""
    if complaint.problem == "sequence entries are not allowed here":
        hint = "write each `- item` on a line of its own, or all in one: [a, b]"
        return SyntaxMistake(complaint.line + 1, "an item of a list on the line of its key", hint)
    if "block scalar" in complaint.context:
        sign = complaint.sign(complaint.begun_line, complaint.begun_column)
        hint = f"after `{sign}` the text begins on the next line; put a text that begins with `{sign}` in quotes"
        return SyntaxMistake(complaint.line + 1, f"text on the line of its `{sign}`", hint)
    return None


def _character(complaint: _Complaint) -> SyntaxMistake | None:
    """Explains a value that begins with a reserved character of YAML."""
    if "cannot start any token" not in complaint.problem and complaint.context not in (
        "while scanning an anchor",
        "while scanning an alias",
    ):
        return None
    sign = complaint.sign(complaint.begun_line, complaint.begun_column)
    return SyntaxMistake(complaint.begun_line + 1, f"a value cannot begin with `{sign}`", _IN_QUOTES)
