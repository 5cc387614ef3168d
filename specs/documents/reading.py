"""Reading of recorded documents, which may be damaged, of another version, or written by another program.

Pydantic compares a document with its shape. The reader gets the parts that fit, so that it can trust their types; the
smallest part with a wrong type is left out.
"""

import json
import os
import re
import stat
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

_LONGEST = 64 << 20
"""Largest number of characters of a document. The documents of the largest runs have a few million."""
_MOST_VALUES = 1_000_000
"""Largest number of values of a document. A document with more is refused before it is parsed, because a value of a few
bytes takes hundreds in memory."""
_SHOWN = 60
"""Largest number of characters of a text that a problem quotes. A longer text is not quoted."""
_NUMBER = re.compile(r"[0-9]{1,9}\.json")
_MOST_PROBLEMS = 10_000
"""Largest number of problems of a document. A document with more is left out as a whole, because its problems would
take gigabytes."""
_Place = tuple[str | int, ...]
"""Keys and indices that lead to a part of a document. () is the whole document."""
_CALLED = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
_CALLED |= {dict: "an object", type(None): "null"}
_WANTED = {"string_type": str, "int_type": int, "float_type": float, "bool_type": bool, "list_type": list}
_WANTED |= {"dict_type": dict, "tuple_type": list}
"""Pydantic's error -> the type that it expects."""


def read_document(path: Path) -> dict[str, Any]:
    """Returns the part of a file's object that has its document's shape; {} if there is no file or no object in it."""
    return read_checked(path)[0]


def read_checked(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the document, and the problems of left-out parts: `stages: a list; expected an object`.

    A missing file has no problems.
    """
    try:
        text = _text(path)
        if sum(map(text.count, ",[{")) > _MOST_VALUES:  # an upper bound: texts have such signs too
            return {}, [f"more than {_MOST_VALUES} values"]
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a character, as "\ud800", cannot be stored
    except (FileNotFoundError, NotADirectoryError):
        return {}, []
    except (OSError, ValueError, RecursionError):
        return {}, ["no JSON object"]
    if not isinstance(value, dict):
        return {}, ["no JSON object"]
    shape = _shape_of(path, value)
    problems = [] if shape is None else _leave_out_misfits(value, shape)
    return value, problems


def numbered(directory: Path) -> list[Path]:
    """Returns the documents of a directory whose files have numbers as names, in their order."""
    try:
        names = [name for name in os.listdir(directory) if _NUMBER.fullmatch(name)]
    except OSError:
        return []
    return [directory / name for name in sorted(names, key=lambda name: (int(name[:-5]), name))]


def _text(path: Path) -> str:
    """Returns the content of a regular file. Refuses others, because a named pipe would keep its reader waiting."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)  # `open` refuses a directory, and leaves its descriptor open
        raise ValueError("no regular file")
    with open(descriptor, encoding="utf-8") as file:
        if len(text := file.read(_LONGEST + 1)) > _LONGEST:
            raise ValueError("too long")
        return text


def _shape_of(path: Path, value: dict[str, Any]) -> Any:
    """Returns the shape of a document, by its file's name; None if any shape is allowed."""
    from specs.documents import shapes  # imported here, to speed up queries that read no document

    if path.name == "certificate.json" and "steps" in value:
        return shapes.Certificates
    return shapes.SHAPES.get(path.name) or (shapes.NUMBERED.get(path.parent.name) if path.stem.isdecimal() else None)


@cache
def _adapter(shape: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(shape)


def _leave_out_misfits(document: dict[str, Any], shape: Any) -> list[str]:
    """Removes the smallest parts that do not fit, and returns their problems."""
    from pydantic import ValidationError

    from specs.documents.shapes import WHOLE

    problems: list[str] = []
    while True:  # the next iteration finds objects that lost a required key
        try:
            _adapter(shape).validate_python(document)
        except ValidationError as error:
            if error.error_count() > _MOST_PROBLEMS:
                document.clear()
                return [f"{error.error_count()} parts of another type"]
            wanted: dict[_Place, list[str]] = {}
            for each in error.errors(include_url=False, include_context=False):
                wanted.setdefault(_place_of(each["loc"], document), []).append(_wanted(each))
        else:
            return problems
        # A key that is null counts as missing. Other problems are handled once these are removed.
        nulls = [place for place in wanted if place and isinstance(place[-1], str) and _at(document, place) is None]
        if not nulls or shape in WHOLE:
            problems += [_problem(place, _at(document, place), all) for place, all in wanted.items()]
        if () in wanted or shape in WHOLE:
            document.clear()
            return problems
        for place in sorted(nulls or wanted, reverse=True):  # last items and inner parts first
            del _at(document, place[:-1])[place[-1]]


def _place_of(location: _Place, document: Any) -> _Place:
    """Returns the part of Pydantic's location that exists in the document. The location also names alternatives and
    missing keys."""
    place: list[str | int] = []
    for part in location:
        try:
            document = document[part]
        except (TypeError, LookupError):
            break
        place.append(part)
    return tuple(place)


def _at(document: Any, place: _Place) -> Any:
    for part in place:
        document = document[part]
    return document


def _wanted(error: "ErrorDetails") -> str:
    """Describes the value that Pydantic expects."""
    if error["type"] == "missing":
        key = error["loc"][-1]
        return f"an object with {key}" if isinstance(key, str) else "a longer list"
    kind = _WANTED.get(error["type"])
    return _CALLED[kind] if kind else re.sub("^(Input should be|Value error,) ", "", error["msg"])


def _problem(place: _Place, value: Any, wanted: list[str]) -> str:
    """Returns a problem with its place, such as `stages.data[3]: a list; expected an object`."""
    given = repr(value) if isinstance(value, str) and len(value) <= _SHOWN else _CALLED[type(value)]
    at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    return f"{at}{': ' if at else ''}{given}; expected {' or '.join(dict.fromkeys(wanted))}"
