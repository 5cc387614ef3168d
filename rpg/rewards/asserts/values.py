"""Values of a program as plain data. The program's process runs `answer`: it calls the program's functions and sends
the values that they return. The values are untrusted: the process of the tests builds new objects from them.

It runs in the sandbox, where our packages are not visible. It imports only the standard library.
"""

import itertools
import json
import os
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from numbers import Complex, Integral, Rational, Real
from time import monotonic
from typing import Any

dumps, loads, write = json.dumps, json.loads, os.write
"""Bound here, before a program can replace them."""
_SCALARS = {type(None), bool, int, float, str}
_MOST_ITEMS = 100_000
"""Largest number of an iterator's items that are sent. Asking for more raises an error."""
SHORT_SECONDS = 0.1
"""Seconds that a program may take to load. More time is taken from its first test. A NUL on standard output reports
that the program is loaded."""
DEEPEST = 50_000
"""Recursion limit while values are sent and received."""
_NUMPY_KINDS = "biufcSU"
_NUMBERS: tuple[tuple[Any, Any], ...] = ((Integral, int), (Rational, Fraction), (Real, float), (Complex, complex))


def _reduced(value: Any) -> list[Any]:
    return list(value.__reduce__()[1])


def _pairs(value: Any) -> list[Any]:
    return list(map(list, value.items()))


def _made_by(kind: type) -> Callable[[list[Any]], Any]:
    return lambda parts: kind(*parts)


_KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[list[Any]], Any]]] = {
    **{kind: (list, kind) for kind in (tuple, set, frozenset, deque, bytes, bytearray)},
    **{kind: (_reduced, _made_by(kind)) for kind in (range, Decimal, Fraction, date, time, datetime, timedelta)},
    **{kind: (_pairs, kind) for kind in (dict, OrderedDict)},
    Counter: (_pairs, lambda parts: Counter(dict(parts))),
    complex: (lambda value: [value.real, value.imag], _made_by(complex)),
    type({}.keys()): (list, lambda parts: dict.fromkeys(parts).keys()),
    type({}.values()): (list, lambda parts: dict(enumerate(parts)).values()),
    type({}.items()): (list, lambda parts: dict(parts).items()),
}
"""Kind -> function that converts a value to a list, and function that converts the list back."""
_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    *((kind, kind) for kind in (tuple, list, dict, set, frozenset, bytes)),
)
"""Kinds whose subclasses are sent as the kind itself, with the function that converts them."""


class _Opaque:
    """A value of the program that is not plain data. It has a truth value and equals nothing."""

    def __init__(self, truth: bool) -> None:
        self._truth = truth

    def __bool__(self) -> bool:
        return self._truth


def _of_numpy(parts: list[Any]) -> Any:
    import numpy as np

    name, shape, items = parts
    if np.dtype(name).kind not in _NUMPY_KINDS:
        raise ValueError(name)
    return np.array(items, np.dtype(name)).reshape(shape)[()]


def _iterator_of(parts: list[Any]) -> Iterator[Any]:
    yield from parts
    if len(parts) == _MOST_ITEMS:
        raise ValueError("more items than are sent")


MAKERS: dict[str, Callable[[list[Any]], Any]] = {kind.__name__: make for kind, (_, make) in _KINDS.items()}
MAKERS |= {"numpy": _of_numpy, "iterator": _iterator_of, "object": lambda parts: _Opaque(bool(parts[0]))}
"""Name of a kind -> function that makes a value of it from a list."""


def _opaque(value: Any) -> Any:
    return {"object": [bool(value)]}


def encoded(value: Any, other: Callable[[Any], Any] = _opaque) -> Any:
    """Returns the value in JSON form: scalars and lists unchanged, any other kind as {name of the kind: list}.

    Args:
        other: encodes a value that is not plain data.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is list:
        return _all(value, other)
    if kind in _KINDS:
        return {kind.__name__: _all(_KINDS[kind][0](value), other)}
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in _NUMPY_KINDS:
        return {"numpy": [value.dtype.str, list(value.shape), _all(value.ravel().tolist(), other)]}
    for abstract, make in _NUMBERS:
        if isinstance(value, abstract):
            return encoded(make(value), other)
    for base, make in _BASES:
        if isinstance(value, base):
            return encoded(make(value), other)
    if isinstance(value, Iterator):
        return {"iterator": _all(list(itertools.islice(value, _MOST_ITEMS)), other)}
    return other(value)


def _all(values: list[Any], other: Callable[[Any], Any]) -> list[Any]:
    return values if _SCALARS.issuperset(map(type, values)) else [encoded(value, other) for value in values]


def decoded(value: Any, makers: dict[str, Callable[[list[Any]], Any]] = MAKERS) -> Any:
    """Returns the value that was given to `encoded`, as new objects. Raises an Exception for any other form."""
    if type(value) is list:
        return list(value) if _SCALARS.issuperset(map(type, value)) else [decoded(each, makers) for each in value]
    if type(value) is not dict:
        return value
    ((name, parts),) = value.items()
    return makers[name](decoded(parts, makers))


def run(names: dict[str, Any]) -> None:
    """Reads sources and calls from standard input, runs the sources in this namespace, and answers the calls of all
    tests."""
    request = loads(sys.stdin.buffer.read())
    begun = monotonic()
    for source in request["sources"]:
        exec(compile(source, "<program>", "exec", dont_inherit=True), names)
    if monotonic() - begun > SHORT_SECONDS:
        write(1, b"\0")
    answer(request["calls"], names)


def answer(calls: str, names: dict[str, Any], number: int = -1) -> None:
    """Calls the program's functions and writes their values as the last line of standard output.

    Args:
        calls: JSON list of each test's calls. After each test a NUL is written.
        names: the program's names.
        number: number of the test whose calls are made; -1 means all tests.
    """
    digits = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    tests = loads(calls)
    said = []
    for test in tests if number < 0 else [tests[number]]:
        said.append([_called(names, *call) for call in test])
        write(1, b"\0")
    depth = sys.getrecursionlimit()
    sys.setrecursionlimit(DEEPEST)
    reply(dumps(said))
    sys.setrecursionlimit(depth)
    sys.set_int_max_str_digits(digits)


def _called(names: dict[str, Any], name: str, arguments: Any, named: Any) -> Any:
    """Returns the value of a call, or the exception that it raised, encoded."""
    depth = sys.getrecursionlimit()
    try:
        value = names[name](*decoded(arguments), **(decoded(named) or {}))
        sys.setrecursionlimit(DEEPEST)
        return encoded(value)
    except Exception as error:
        kind = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
        return {"error": [kind.__name__, str(error)[:500]]}
    finally:
        sys.setrecursionlimit(depth)


def reply(text: str) -> None:
    """Writes the text as a line of standard output, even if the program replaced `sys.stdout`."""
    with suppress(Exception):
        sys.stdout.flush()
    rest = memoryview(f"\n{text}\n".encode())
    while rest:
        rest = rest[write(1, rest) :]
