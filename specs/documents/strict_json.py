"""Strict reading of JSON from other programs. Texts that do not follow the JSON standard are refused with a short
reason.

Python's own reader accepts more: halves of characters, which no tokenizer, database or file accepts later, NaN, and
objects in which the last of two equal keys wins.
"""

import json
import math
from typing import Any


class NotJsonError(ValueError):
    """Error: a text is not JSON."""


_HALF = "\\ud"
"""Prefix of every escaped half of a character (a surrogate)."""


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        NotJsonError: it is not JSON.
        ValueError: it has half a character, a number that is NaN, infinite or too long, or a key twice in one object.
            The message names the reason, without the text.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise NotJsonError("not UTF-8") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_int=_whole_number,
            parse_float=_number,
        )
    except json.JSONDecodeError as error:
        raise NotJsonError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise NotJsonError("nested too deeply") from None
    if _HALF in text.lower() and (half := half_character(json.dumps(value, ensure_ascii=False))):
        raise ValueError(half)
    return value


def half_character(text: str) -> str:
    """Returns a reason to refuse a text that contains half a character (an unpaired surrogate); empty for other
    texts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"half a character: \\u{ord(text[error.start]):04x} without its other half"
    return ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"the key {json.dumps(twice[:40])} twice in one object")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name}, which JSON does not have; write null or a text")


def _whole_number(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"a whole number of {len(digits)} digits") from None


def _number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]}, which is too large for a float")
    return number
