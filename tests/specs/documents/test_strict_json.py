"""JSON of others: what JSON defines is read as Python reads it, and all else is refused with a reason."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specs.documents.strict_json import parse_json

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)


@given(VALUES, st.booleans())
@settings(max_examples=50)
def test_json_is_read_as_it_was_written(value: object, ascii_alone: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_alone)
    assert parse_json(text) == parse_json(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r'["\ud83d"]', r"half a character: \ud83d without"),
        (r'{"\uDE00": 1}', r"half a character: \ude00 without"),
        (r'["\ude00\ud83d"]', r"half a character: \ude00 without"),
        ("-" + "9" * 5000, "a whole number of 5001 digits"),
        ("[NaN]", "NaN, which"),
        ('{"a": Infinity}', "Infinity, which"),
        ("1e400", "1e400, which is too large for a float"),
        ('{"a": {"b": 1, "b": 1}}', 'the key "b" twice'),
        ("[" * 100_000, "nested too deeply"),
        ("{'a': 1}", "not JSON: "),
        (b'"\xff"', "not UTF-8"),
    ],
)
def test_what_is_no_json_is_refused_with_its_reason(text: str | bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
        parse_json(text)


def test_whole_characters_in_escapes_are_read() -> None:
    assert parse_json(r'["\ud83d\ude00", "\\ud83d"]') == ["\U0001f600", r"\ud83d"]
