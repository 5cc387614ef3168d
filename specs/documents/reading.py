"""Reading a document of a record that may be damaged, of another version, or made by somebody else.

Whoever reads one gets what of it has the shape of such documents, so that nothing behind the reading doubts types.
What has another shape is passed over, in the smallest part that can be.
"""

import json
import os
import re
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

_LARGEST = 2**63
"""Whole numbers of that size fit into no column."""
_LONGEST = 64 << 20
"""Characters of a document; those of the largest runs have a few million."""
_SHOWN = 60
"""Characters of a text that a problem quotes; of a longer one it says that it is a text."""
_NUMBER = re.compile(r"[0-9]{1,9}\.json")
_MISFIT = object()
_Place = tuple[Any, ...]
"""Place in a document: what holds the value, itself such a place, and the key or index there; () is the document."""
_Fitter = Callable[[Any, _Place, list[str]], Any]
"""Part of a value that has a shape, or _MISFIT. It is given the value's place, and adds to the list of problems."""


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
    fitted = value if shape is None else _fitter(shape)(value, (), problems)
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
        if len(text := file.read(_LONGEST + 1)) > _LONGEST:
            raise ValueError("too long")
        return text


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


@cache
def _fitter(shape: Any) -> _Fitter:
    """Finds the part of a value that has the shape, or _MISFIT. A record holds thousands of values of a few shapes."""
    kind, arguments = get_origin(shape), get_args(shape)
    if shape is Any:
        return lambda value, _at, _problems: value
    if kind in (Union, UnionType):
        return _fitter_of_one(arguments)
    if kind is Annotated:
        return _fitter_of_tested(*arguments)
    if kind is Literal:
        wanted = f"one of {', '.join(arguments)}"
        return lambda value, at, problems: value if value in arguments else _misfit(value, wanted, at, problems)
    if is_typeddict(shape):
        return _fitter_of_object(shape)
    if kind is dict:
        return _fitter_of_mapping(_fitter(arguments[1]))
    if kind is list:
        return _fitter_of_list(_fitter(arguments[0]))
    if kind is tuple:
        return _fitter_of_tuple([*map(_fitter, arguments)])
    called = _called(kind or shape)

    def fit(value: Any, at: _Place, problems: list[str]) -> Any:
        return value if kind is None and _is_plain(value, shape) else _misfit(value, called, at, problems)

    return fit


def _fitter_of_one(shapes: tuple[Any, ...]) -> _Fitter:
    """For a value that has one of several shapes."""
    may_be_none = NoneType in shapes
    shapes = tuple(shape for shape in shapes if shape is not NoneType)
    fitters = [*map(_fitter, shapes)]
    wanted = " or ".join(_called(get_origin(shape) or shape) for shape in shapes)

    def fit(value: Any, at: _Place, problems: list[str]) -> Any:
        if value is None and may_be_none:
            return None
        if len(fitters) == 1:
            return fitters[0](value, at, problems)
        for each in fitters:
            found: list[str] = []
            fitted = each(value, at, found)
            if not found:
                return fitted
        return _misfit(value, wanted, at, problems)

    return fit


def _fitter_of_tested(inner: Any, test: Callable[[Any], bool], wanted: str) -> _Fitter:
    """For a value that has a shape and passes a test."""
    fit_inner = _fitter(inner)

    def fit(value: Any, at: _Place, problems: list[str]) -> Any:
        fitted = fit_inner(value, at, problems)
        return fitted if fitted is _MISFIT or test(fitted) else _misfit(value, wanted, at, problems)

    return fit


def _fitter_of_mapping(fit_item: _Fitter) -> _Fitter:
    def fit(value: Any, at: _Place, problems: list[str]) -> Any:
        if not isinstance(value, dict):
            return _misfit(value, _called(dict), at, problems)
        return _kept({key: fit_item(item, (at, key), problems) for key, item in value.items()})

    return fit


def _fitter_of_list(fit_item: _Fitter) -> _Fitter:
    def fit(value: Any, at: _Place, problems: list[str]) -> Any:
        if not isinstance(value, list):
            return _misfit(value, _called(list), at, problems)
        items = [fit_item(item, (at, index), problems) for index, item in enumerate(value)]
        return [item for item in items if item is not _MISFIT]

    return fit


def _fitter_of_tuple(fitters: list[_Fitter]) -> _Fitter:
    def fit(value: Any, at: _Place, problems: list[str]) -> Any:
        if not isinstance(value, list) or len(value) != len(fitters):
            return _misfit(value, _called(tuple), at, problems)
        parts = [each(part, at, problems) for each, part in zip(fitters, value, strict=True)]
        return _MISFIT if any(part is _MISFIT for part in parts) else parts

    return fit


def _fitter_of_object(shape: Any) -> _Fitter:
    """For an object with these keys. Keys that are null count as missing."""

    def fit(value: Any, at: _Place, problems: list[str]) -> Any:
        if not isinstance(value, dict):
            return _misfit(value, "an object", at, problems)
        kept = dict(value)
        for key, fit_key, may_be_null in _keys(shape):
            if key in kept and (kept[key] is not None or may_be_null):
                kept[key] = fit_key(kept[key], (at, key), problems)
            else:
                kept[key] = _MISFIT
        kept = _kept(kept)
        if missing := shape.__required_keys__ - kept.keys():
            problems.append(_said(at, f"without {', '.join(sorted(missing))}"))
            return _MISFIT
        return kept

    return fit


def _kept(items: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in items.items() if item is not _MISFIT}


@cache
def _keys(shape: Any) -> list[tuple[str, _Fitter, bool]]:
    """An object's keys, what finds their values, and whether these may be null. An object may hold others of its kind,
    so that they are looked up when a value is there."""
    hints = get_type_hints(shape, include_extras=True)
    inners = {key: get_args(hint)[0] if get_origin(hint) is Required else hint for key, hint in hints.items()}
    return [(key, _fitter(inner), _may_be_null(inner)) for key, inner in inners.items()]


def _may_be_null(shape: Any) -> bool:
    return shape is Any or NoneType in get_args(shape)


def _is_plain(value: Any, shape: Any) -> bool:
    """Whether a value is a text, number or truth value, as the shape says. `true` is no number."""
    if isinstance(value, bool) or shape is bool:
        return isinstance(value, bool) and shape is bool
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return False
    return isinstance(value, (int, float) if shape is float else shape)


def _misfit(value: Any, wanted: str, at: _Place, problems: list[str]) -> Any:
    given = repr(value) if isinstance(value, str) and len(value) <= _SHOWN else _called(type(value))
    problems.append(_said(at, f"{given}; expected {wanted}"))
    return _MISFIT


def _said(at: _Place, problem: str) -> str:
    """A problem with its place, such as `stages.data[3]: ...`; of the whole document the problem alone."""
    place = ""
    while at:
        at, key = at
        place = f"[{key}]{place}" if isinstance(key, int) else f".{key}{place}"
    return f"{place.removeprefix('.')}: {problem}" if place else problem


def _called(kind: Any) -> str:
    """A type in words."""
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
    return names.get(kind) or {list: "a list", tuple: "a list of its kind", Annotated: "another text"}.get(
        kind, "an object"
    )
