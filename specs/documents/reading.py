"""Reading a document of a record that may be damaged, of another version, or made by somebody else.

Whoever reads one gets what of it has the shape of such documents, so that nothing behind the reading doubts types.
What has another shape is passed over, in the smallest part that can be.
"""

import json
import os
import re
import stat
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

_LARGEST = 2**63
"""Whole numbers of that size fit into no column."""
_SHOWN = 60
"""Characters of a text that a problem quotes; of a longer one it says that it is a text."""
_NUMBER = re.compile(r"[0-9]{1,9}\.json")
_MISFIT = object()


def read_document(path: Path) -> dict[str, Any]:
    """Content of a file, as far as it has its document's shape; {} where the file is missing or holds no object."""
    return read_checked(path)[0]


def read_checked(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The document, and what of the file had to be passed over: `stages: a list; expected an object`.

    A file that is not there has nothing wrong.
    """
    try:
        text = _text(path)
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a character, as "\ud800", fits into no column
    except (FileNotFoundError, NotADirectoryError):
        return {}, []
    except (OSError, ValueError, RecursionError):
        return {}, ["no JSON object"]
    if not isinstance(value, dict):
        return {}, ["no JSON object"]
    shape = _shape_of(path, value)
    problems: list[str] = []
    fitted = value if shape is None else _fit(value, shape, "", problems)
    if fitted is _MISFIT or (problems and _counts_whole(shape)):
        return {}, problems
    return fitted, problems


def numbered(directory: Path) -> list[Path]:
    """The documents of a directory whose files are called by numbers, in their order."""
    try:
        names = [name for name in os.listdir(directory) if _NUMBER.fullmatch(name)]
    except OSError:
        return []
    return [directory / name for name in sorted(names, key=lambda name: (int(name[:-5]), name))]


def _text(path: Path) -> str:
    """The content of a regular file; a named pipe would keep its reader waiting."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)  # `open` refuses a directory, and leaves its descriptor open
        raise ValueError("no regular file")
    with open(descriptor, encoding="utf-8") as file:
        return file.read()


def _shape_of(path: Path, value: dict[str, Any]) -> Any:
    """Shape of a document, by its file's name; None: anything."""
    from specs.documents import shapes  # here, as a query that reads no document is answered sooner without

    if path.name == "certificate.json" and "steps" in value:
        return shapes.Certificates
    return shapes.SHAPES.get(path.name) or (shapes.NUMBERED.get(path.parent.name) if path.stem.isdecimal() else None)


def _counts_whole(shape: Any) -> bool:
    """Whether a part of such a document says nothing."""
    from specs.documents import shapes

    return shape in shapes.WHOLE


def _fit(value: Any, shape: Any, at: str, problems: list[str]) -> Any:
    """The part of a value that has the shape, or _MISFIT. `at`: its place in the document; `problems` is added to."""
    if shape is Any:
        return value
    kind, arguments = get_origin(shape), get_args(shape)
    if kind in (Union, UnionType):
        return _fit_one(value, arguments, at, problems)
    if kind is Annotated:
        inner, test, wanted = arguments
        fitted = _fit(value, inner, at, problems)
        return fitted if fitted is _MISFIT or test(fitted) else _misfit(value, wanted, at, problems)
    if kind is Literal:
        return value if value in arguments else _misfit(value, f"one of {', '.join(arguments)}", at, problems)
    if is_typeddict(shape):
        return _fit_object(value, shape, at, problems)
    if kind is dict and isinstance(value, dict):
        places = {key: f"{at}.{key}" if at else key for key in value}
        return _kept({key: _fit(item, arguments[1], places[key], problems) for key, item in value.items()})
    if kind is list and isinstance(value, list):
        items = [_fit(item, arguments[0], f"{at}[{index}]", problems) for index, item in enumerate(value)]
        return [item for item in items if item is not _MISFIT]
    if kind is tuple and isinstance(value, list) and len(value) == len(arguments):
        parts = [_fit(*part, at, problems) for part in zip(value, arguments, strict=True)]
        return _MISFIT if any(part is _MISFIT for part in parts) else parts
    if kind is None and _is_plain(value, shape):
        return value
    return _misfit(value, _called(kind or shape), at, problems)


def _fit_one(value: Any, shapes: tuple[Any, ...], at: str, problems: list[str]) -> Any:
    """The part of a value that has one of several shapes."""
    if value is None and NoneType in shapes:
        return None
    shapes = tuple(shape for shape in shapes if shape is not NoneType)
    for shape in shapes:
        found: list[str] = []
        fitted = _fit(value, shape, at, found)
        if not found or len(shapes) == 1:
            problems += found
            return fitted
    return _misfit(value, " or ".join(_called(get_origin(shape) or shape) for shape in shapes), at, problems)


def _fit_object(value: Any, shape: Any, at: str, problems: list[str]) -> Any:
    """The part of a value that has the shape of an object with these keys. Keys that are null count as missing."""
    if not isinstance(value, dict):
        return _misfit(value, "an object", at, problems)
    kept = dict(value)
    for key, inner in _keys(shape).items():
        if key in kept and (kept[key] is not None or _may_be_null(inner)):
            kept[key] = _fit(kept[key], inner, f"{at}.{key}" if at else key, problems)
        else:
            kept[key] = _MISFIT
    kept = _kept(kept)
    if missing := shape.__required_keys__ - kept.keys():
        said = f"{at}: " if at else ""
        problems.append(f"{said}without {', '.join(sorted(missing))}")
        return _MISFIT
    return kept


def _kept(items: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in items.items() if item is not _MISFIT}


@cache
def _keys(shape: Any) -> dict[str, Any]:
    """The shapes of an object's keys."""
    return {
        key: get_args(hint)[0] if get_origin(hint) is Required else hint
        for key, hint in get_type_hints(shape, include_extras=True).items()
    }


def _may_be_null(shape: Any) -> bool:
    return shape is Any or NoneType in get_args(shape)


def _is_plain(value: Any, shape: Any) -> bool:
    """Whether a value is a text, number or truth value, as the shape says. `true` is no number."""
    if isinstance(value, bool) or shape is bool:
        return isinstance(value, bool) and shape is bool
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return False
    return isinstance(value, (int, float) if shape is float else shape)


def _misfit(value: Any, wanted: str, at: str, problems: list[str]) -> Any:
    given = repr(value) if isinstance(value, str) and len(value) <= _SHOWN else _called(type(value))
    problems.append(f"{at}: {given}; expected {wanted}" if at else f"{given}; expected {wanted}")
    return _MISFIT


def _called(kind: Any) -> str:
    """A type in words."""
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
    return names.get(kind) or {list: "a list", tuple: "a list of its kind", Annotated: "another text"}.get(
        kind, "an object"
    )
