"""The part of `rpg.rewards.asserts` that runs in the sandbox. It imports the standard library alone: programs are not
shown our packages.

The process of the program runs `answer`: it calls the program's functions, and sends values as plain data. The process
of the tests runs `Examination`: it has the expected values, and nothing of the program but that data. Tests that need
more than data run beside the program, by `Beside`.
"""

import ast
import builtins
import itertools
import json
import os
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from numbers import Complex, Integral, Rational, Real
from types import ModuleType
from typing import Any

_dumps, _loads, _write, _exit, _urandom = json.dumps, json.loads, os.write, os._exit, os.urandom
"""Bound here, before a program can replace them."""
_SCALARS = {type(None), bool, int, float, str}
_MOST_ITEMS = 100_000
"""Items of an iterator that are sent. Whoever asks for more gets an error."""
_MOST_UNKNOWN = 2_000
"""Calls that are asked for at once, and conditions on values that are not known: a test may loop until one holds."""
_DEEPEST = 50_000
"""Limit of recursion where values are sent and received."""
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
"""Kind -> how it becomes a list, and how the list becomes it."""
_BASES = (defaultdict, str, tuple, list, dict, set, frozenset)
"""Kinds whose subclasses are sent as the kind itself."""


class _Opaque:
    """A value of the program that is no plain data: it has a truth value and equals nothing."""

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


_MAKERS: dict[str, Callable[[list[Any]], Any]] = {kind.__name__: make for kind, (_, make) in _KINDS.items()}
_MAKERS |= {"numpy": _of_numpy, "iterator": _iterator_of, "object": lambda parts: _Opaque(bool(parts[0]))}


def _opaque(value: Any) -> Any:
    return {"object": [bool(value)]}


def encoded(value: Any, other: Callable[[Any], Any] = _opaque) -> Any:
    """Returns the value as JSON has it: scalars and lists as they are, any other kind as {name of the kind: list}.

    Args:
        other: gives the form of what is no plain data.
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
    for base in _BASES:
        if isinstance(value, base):
            plain = dict if base is defaultdict else base
            return encoded(str.__str__(value) if plain is str else plain(value), other)
    if isinstance(value, Iterator):
        return {"iterator": _all(list(itertools.islice(value, _MOST_ITEMS)), other)}
    return other(value)


def _all(values: list[Any], other: Callable[[Any], Any]) -> list[Any]:
    return values if _SCALARS.issuperset(map(type, values)) else [encoded(value, other) for value in values]


def decoded(value: Any) -> Any:
    """Returns what `encoded` was given, as new objects. Raises an Exception where it is no such form."""
    if type(value) is list:
        return list(value) if _SCALARS.issuperset(map(type, value)) else [decoded(each) for each in value]
    if type(value) is not dict:
        return value
    ((name, parts),) = value.items()
    return _MAKERS[name](decoded(parts))


def answer(calls: str, names: dict[str, Any]) -> None:
    """Makes the calls and writes the values as the last line of standard output."""
    said = []
    digits, depth = sys.get_int_max_str_digits(), sys.getrecursionlimit()
    for name, arguments, named in _loads(calls):
        try:
            value = names[name](*decoded(arguments), **decoded(named))
            sys.setrecursionlimit(_DEEPEST)
            said.append(encoded(value))
        except Exception as error:
            kind = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
            said.append({"error": [kind.__name__, str(error)[:500]]})
        finally:
            sys.setrecursionlimit(depth)
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(_DEEPEST)
    reply(_dumps(said))
    sys.set_int_max_str_digits(digits)
    sys.setrecursionlimit(depth)


def reply(text: str) -> None:
    """Writes the text as the last line of standard output, whatever `sys.stdout` is by now."""
    with suppress(Exception):
        sys.stdout.flush()
    rest = memoryview(f"\n{text}".encode())
    while rest:
        rest = rest[_write(1, rest) :]


class NeedsProgramError(BaseException):
    """The tests need the program itself, and not its values alone. No Exception, as tests may catch those."""


class _EnoughError(BaseException):
    """A test that has asked for as much as is asked for at once."""


class _Unknown:
    """Value of a call that has not been made. What is done with it has no result yet."""

    conditions = 0
    """How often one was a condition in this run of a test. They hold."""

    __array_ufunc__ = __iter__ = __contains__ = None
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        numpy = sys.modules.get("numpy")
        if name in _METHODS or (numpy and hasattr(numpy.ndarray, name)):
            return _UnknownMethod()
        raise NeedsProgramError

    def __bool__(self) -> bool:
        _Unknown.conditions += 1
        if _Unknown.conditions > _MOST_UNKNOWN:
            raise _EnoughError
        return True

    def __setattr__(self, name: str, value: object) -> None:
        raise NeedsProgramError

    def __call__(self, *_: object, **__: object) -> Any:
        raise NeedsProgramError


class _UnknownMethod(_Unknown):
    """What a value that is not known yet has under the name of a method of plain data."""

    def __call__(self, *_: object, **__: object) -> Any:
        return _Unknown()


_METHODS = {name for kind in (str, list, dict, set, bytes, int, float) for name in dir(kind)}


def _itself(self: _Unknown, *others: object) -> _Unknown:
    for other in others:
        if not isinstance(other, _Unknown):
            encoded(other, _refused)  # an object is compared by its own means
    return self


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"):
    setattr(_Unknown, f"__{_name}__", _itself)
for _name in ("floordiv", "mod", "pow", "neg", "abs", "round", "getitem", "and", "or"):
    setattr(_Unknown, f"__{_name}__", _itself)


_MODULES = {
    *("abc", "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum"),
    *("fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "numbers", "numpy", "operator"),
    *("queue", "random", "re", "statistics", "string", "typing", "unicodedata"),
}
"""What tests may import: nothing that would run a text, which may be a value of the program."""
_RUNS_TEXT = {"eval", "exec", "compile", "__import__", "open", "input", "globals", "locals", "vars"}


class _Asserts(ast.NodeTransformer):
    """Puts `_assert(lambda: X)` in the place of `assert X`, so that tests go on where X is not known yet."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        call = ast.Call(ast.Name("_assert", ast.Load()), [ast.Lambda(nothing, node.test)], [])
        return ast.copy_location(ast.Expr(call), node)


class Examination:
    """Tests of a problem, run without the program.

    A test is run with what is known of the program's values. Where it needs more it is run on with values that are
    not known, to learn which further calls it makes; then the program is asked for all of them at once.
    """

    def __init__(self, setup: str, tests: list[str], function: str) -> None:
        """Runs the setup. What is wrong with the texts is raised."""
        sys.set_int_max_str_digits(0)
        sys.setrecursionlimit(_DEEPEST)
        self._setup = compile(setup, "<setup>", "exec")
        trees = [ast.parse(test) for test in tests]
        self._before = self._fresh()
        used = [node for tree in trees for node in ast.walk(tree)]
        self._functions = _functions_of(used, self._before, function)
        self._needs_program = any(map(_needs_program, [*used, *ast.walk(ast.parse(setup))])) or not _only_called(
            used, self._functions
        )
        self._tests = [compile(ast.fix_missing_locations(_Asserts().visit(tree)), "<test>", "exec") for tree in trees]
        self._first: list[list[str]] = []
        self.begin()

    def begin(self) -> None:
        """Forgets what tests have left."""
        self._names = self._fresh()
        self._names |= {name: partial(self._call, name) for name in self._functions}
        self._names["_assert"] = self._assert

    def first_calls(self) -> str:
        """Returns the calls that the next test makes first, JSON; `beside` where it needs the program itself."""
        self._requests, self._answers = [], []
        try:
            _, self._names = self._run(len(self._first))
        except NeedsProgramError:
            self._needs_program = True
        if self._needs_program:
            return "beside"
        self._first.append(self._requests)
        return self._new_calls()

    def judge(self, number: int, answers: str, *, first: bool) -> str:
        """Runs a test with the values that calls have given.

        Args:
            answers: values of the calls that were asked for last, JSON.
            first: these are the first calls of the test.
        Returns:
            `passed` or `failed`; else further calls that it makes, JSON.
        """
        if first:
            self._requests, self._answers = [*self._first[number]], []
        try:
            known = _loads(answers)
        except (ValueError, RecursionError):
            return "failed"
        if type(known) is not list or len(known) != len(self._requests) - len(self._answers):
            return "failed"
        self._answers += known
        passed, names = self._run(number)
        if self._asked:
            return self._new_calls()
        self._names = names
        return "passed" if passed else "failed"

    def _fresh(self) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "tests"}
        exec(self._setup, names)
        return names

    def _new_calls(self) -> str:
        return f"[{', '.join(self._requests[len(self._answers) :])}]"

    def _run(self, number: int) -> tuple[bool, dict[str, Any]]:
        """Whether the test passed, as far as that is known, and the names that it leaves."""
        self._place = self._asked = _Unknown.conditions = 0
        names = dict(self._names)
        random.seed(0)  # it is to make the same calls each time
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(0)
        try:
            exec(self._tests[number], names)
        except NeedsProgramError:
            raise
        except BaseException:
            return False, names
        return True, names

    def _assert(self, condition: Callable[[], Any]) -> None:
        try:
            holds = condition()
        except Exception:
            if self._asked:
                return
            raise
        if not self._asked and not holds:
            raise AssertionError

    def _call(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        request = _dumps([name, encoded(list(arguments), _refused), encoded(named, _refused)])
        place, self._place = self._place, self._place + 1
        if not self._asked and place < len(self._answers) and self._requests[place] == request:
            return _value(self._answers[place])
        if not self._asked:
            del self._requests[place:], self._answers[place:]
        elif self._asked == _MOST_UNKNOWN:
            raise _EnoughError
        self._asked += 1
        self._requests.append(request)
        return _Unknown()


def _refused(_value: Any) -> Any:
    raise NeedsProgramError


def _value(said: Any) -> Any:
    """Returns the value of a call, or raises what the call raised."""
    if type(said) is dict and "error" in said:
        name, text = said["error"]
        kind = getattr(builtins, str(name), None)
        kind = kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception
        raise kind(text)
    return decoded(said)


def _functions_of(nodes: list[ast.AST], known: dict[str, Any], function: str) -> set[str]:
    """Names that tests take from the program."""
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            own |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {name for name in loaded - own - set(known) if not hasattr(builtins, name)} | ({function} - {""})


def _needs_program(node: ast.AST) -> bool:
    """Whether the node might run a text of the program's, or looks at the identity of its objects."""
    match node:
        case ast.Import(names=names):
            return any(alias.name.partition(".")[0] not in _MODULES for alias in names)
        case ast.ImportFrom(module=module):
            return (module or "").partition(".")[0] not in _MODULES
        case ast.Name(id=name):
            return name in _RUNS_TEXT
        case ast.Compare(ops=operators, comparators=others):
            pairs = zip(operators, others, strict=True)
            return any(
                isinstance(each, (ast.Is, ast.IsNot)) and not isinstance(other, ast.Constant) for each, other in pairs
            )
        case ast.NamedExpr() | ast.Await() | ast.Global():
            return True
    return False


def _only_called(nodes: list[ast.AST], functions: set[str]) -> bool:
    """Whether tests have functions of the program, call them or hand them on, and take the values.

    A capital is the beginning of a class. A value that is dropped was asked for by what the call does to its arguments,
    but within `try`, where it is to raise.
    """
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    called = [part for call in calls for part in (call.func, *call.args, *(each.value for each in call.keywords))]
    called = [part for part in called if isinstance(part, ast.Name)]
    named = [node for node in nodes if isinstance(node, ast.Name) and node.id in functions]
    tried = {id(each) for node in nodes if isinstance(node, ast.Try) for part in node.body for each in ast.walk(part)}
    dropped = [node.value for node in nodes if isinstance(node, ast.Expr) and id(node) not in tried]
    return (
        bool(functions)
        and not any(name[0].isupper() for name in functions)
        and {id(node) for node in named} <= {id(part) for part in called}
        and not any(
            isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in {*functions, "candidate"}
            for call in dropped
        )
    )


class _PlainSides(ast.NodeTransformer):
    """Where tests compare with a literal, puts `_plain(X)` in the place of the other side X, and `_literal(N)` in that
    of the literal: who called a function is seen by it, with the literals in it."""

    def __init__(self) -> None:
        self.literals: list[Any] = []

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        if any(map(_is_literal, sides)):
            node.left, *node.comparators = map(self._side, sides)
        return node

    def _side(self, node: ast.expr) -> ast.expr:
        if not _is_literal(node):
            return ast.Call(ast.Name("_plain", ast.Load()), [node], [])
        self.literals.append(ast.literal_eval(node))
        return ast.Call(ast.Name("_literal", ast.Load()), [ast.Constant(len(self.literals) - 1)], [])


def _is_literal(node: ast.expr) -> bool:
    try:
        return not any(ast.literal_eval(node) is each for each in (None, True, False))
    except (ValueError, TypeError, SyntaxError):
        return False


class Beside:
    """Tests that run beside the program, in a child of a process that has not loaded it.

    What a test needs is bound before the program is loaded. The child says that a test has passed by a word that only
    its parent can check; what it prints or how it ends says nothing.
    """

    def __init__(self, setup: str, tests: list[str], function: str) -> None:
        """Runs the setup and compiles the tests."""
        self._main = ModuleType("__main__")
        exec(compile(setup, "<setup>", "exec"), self._main.__dict__)
        trees = [ast.parse(test) for test in tests]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        sides = _PlainSides()
        self._tests = [compile(ast.fix_missing_locations(sides.visit(tree)), "<test>", "exec") for tree in trees]
        self._own = {"_plain": _plain, "_literal": sides.literals.__getitem__, "__builtins__": dict(vars(builtins))}
        self._builtins: set[str] = set()
        if _functions_of(nodes, self._main.__dict__, function):  # else the program's has the name of a builtin
            self._builtins = set(vars(builtins)) - {function}

    def start(self, program: str) -> bool:
        """Starts the child. Whether it has loaded the program."""
        compiled = compile(program, "<program>", "exec")
        sys.stdout.flush()
        sys.modules["linecache"].cache.clear()
        self._word = _urandom(16)
        orders, self._orders = os.pipe()
        self._words, words = os.pipe()
        if os.fork() == 0:
            passed = map(_write, itertools.repeat(words), itertools.repeat(self._word)).__next__
            self._word = b""
            try:
                os.dup2(2, 1)
                os.closerange(3, min(orders, words))
                os.closerange(min(orders, words) + 1, max(orders, words))
                os.closerange(max(orders, words) + 1, 1 << 16)
                self._work(compiled, partial(os.read, orders, 4), passed, partial(_write, words, b"-"))
            finally:
                _exit(1)
        os.close(orders)
        os.close(words)
        return self._answered()

    def passes(self, number: int) -> bool:
        """Whether a test passes."""
        with suppress(BrokenPipeError):
            _write(self._orders, number.to_bytes(4, "little"))
        return self._answered()

    def _answered(self) -> bool:
        return os.read(self._words, 64) == self._word

    def _work(
        self, program: Any, order: Callable[[], bytes], passed: Callable[[], Any], failed: Callable[[], Any]
    ) -> None:
        number_of, run = int.from_bytes, exec
        sys.modules["__main__"] = self._main
        names = self._main.__dict__
        run(program, names)
        passed()
        names = {**names, **{name: self._own["__builtins__"][name] for name in names if name in self._builtins}}
        names |= self._own
        while True:
            test = self._tests[number_of(order(), "little")]
            try:
                run(test, names)
            except Exception:
                failed()
            else:
                passed()


def _plain(value: Any) -> Any:
    """Returns a copy of the value that consists of plain data."""
    return decoded(encoded(value))
