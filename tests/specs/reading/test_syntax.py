"""Text that is no YAML: each mistake in plain words, at the line of its cause."""

import pytest

from specs.errors import SpecError
from specs.reading.yaml import parse_bytes

COLUMNS = "entries of one section begin at the same column"
QUOTES = 'put the text in quotes: "..."'

MISTAKES = {
    "a tab": ("a:\n\tb: 1\n", 2, "a tab: YAML allows only spaces", "write spaces in its place"),
    "a brace": ("c: {low: 1, high: 2\n\nreference: 3\n", 1, "the `{` is never closed", "a `}` is missing"),
    "a brace around another": ("o:\n  c: {a: {b: 1}\n  d: 2\n", 2, "the `{` is never closed", "a `}` is missing"),
    "a brace at the end": ("c: {low: 1\n", 1, "the `{` is never closed", "a `}` is missing"),
    "a bracket": ("s: [0, 1\n\nmodel: {a: 1}\n", 1, "the `[` is never closed", "a `]` is missing"),
    "a brace too many": (
        "a: 1\nc: {a: 1}}\n",
        2,
        "a `}` without an opening bracket",
        "remove it, or add the opening bracket",
    ),
    "a comma": ("c: {low: 1 high: 2}\n", 1, "a comma is missing between two entries", "write it before `high`"),
    "a comma at the end of a line": (
        "c: {low: 1,\n    high: 2\n    dual: 3}\n",
        3,
        "a comma is missing between two entries",
        "write it before `dual`",
    ),
    "a template without quotes": ("p: {t: {x} =}\n", 1, "there is text after the closing `}`", QUOTES),
    "a template alone without quotes": ("p:\n  t: {x} =\n", 2, "there is text after the closing `}`", QUOTES),
    "a colon": ("a:\n  b: 1\n  c 2\n  d: 3\n", 3, "a colon is missing after `c`", "write `c: 2`"),
    "a colon after a section": ("a: 1\nb\n  c: 2\n", 2, "a colon is missing after `b`", "write `b:`"),
    "a colon in the first line": ("# why\na\nb: 1\n", 2, "a colon is missing after `a`", "write `a:`"),
    "a space after the colon": ("a: 1\nc:2\nd: 3\n", 2, "a space is missing after the colon", "write `c: 2`"),
    "a second colon": ("q: What: is it\n", 1, "a second `: ` in the line", QUOTES),
    "too far in": ("a:\n  b: 1\n   c: 2\n", 3, "indented under line 2, which has a value already", COLUMNS),
    "too far out": ("a:\n    b: 1\n  c: 2\n", 3, "the indentation matches no line above", COLUMNS),
    "an item among keys": (
        "a:\n  b: 1\n  - c\n",
        3,
        "an item of a list among keys",
        "indent it under the key that it belongs to",
    ),
    "a key among items": ("- a\nb: 1\n", 2, "a key among the items of a list", COLUMNS),
    "an item on the line of its key": (
        "a: - b\n",
        1,
        "an item of a list on the line of its key",
        "write each `- item` on a line of its own, or all in one: [a, b]",
    ),
    "a quote": ('q: "abc\nb: 1\n', 1, 'the `"` is never closed', 'a `"` is missing'),
    "a quote that another one closes": ('q: "abc\nb: "d"\n', 1, 'the `"` is never closed', 'a `"` is missing'),
    "a quote that closes before a brace": (
        'q: "abc\np: {t: "{x}"}\n',
        1,
        'the `"` is never closed',
        'a `"` is missing',
    ),
    "a space after the dash": (
        "a:\n  -{b: c, d: 1}\n",
        2,
        "a space is missing after the dash",
        "write `- {b: c, d: 1}`",
    ),
    "an apostrophe": (
        "q: 'Doesn't it'\n",
        1,
        "there is text after the closing `'`",
        "inside '...' write the quote twice, or take \"...\"",
    ),
    "quotes in quotes": ('q: "a "b" c"\n', 1, 'there is text after the closing `"`', 'inside "..." write \\"'),
    "a backslash": (
        'q: "\\d"\n',
        1,
        '"..." has no escape `\\d`',
        "write the backslash twice, or use '...', which has no escapes",
    ),
    "a sign of YAML's own": ("q: @x\n", 1, "a value cannot begin with `@`", QUOTES),
    "an ampersand": ("q: & x\n", 1, "a value cannot begin with `&`", QUOTES),
    "a star": ("q: *.json\n", 1, "the alias *.json is not defined", 'put a text that begins with `*` in quotes: "..."'),
    "text on the line of its bar": (
        "q: | x\n",
        1,
        "text on the line of its `|`",
        "after `|` the text begins on the next line; put a text that begins with `|` in quotes",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_at_its_cause(case):
    text, line, message, hint = MISTAKES[case]
    with pytest.raises(SpecError) as caught:
        parse_bytes(text.encode(), "spec.yaml")
    (issue,) = caught.value.issues
    assert (issue.line, issue.message, issue.hint) == (line, message, hint)
