"""Tests that run without the program. This process has the expected values, and only plain data from the program.

It runs in the sandbox, where our packages are not visible. It imports only the standard library and `values`.
"""

import ast
import builtins
import importlib
import random
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial, wraps
from typing import Any

from rpg.rewards.asserts.values import DEEPEST, MAKERS, decoded, dumps, encoded, loads

_MOST_UNKNOWN = 2_000
"""Largest number of calls requested at once, and of conditions on unknown values. A test may loop until a condition
holds."""


class NeedsProgramError(BaseException):
    """Signal that the tests need the program itself, and not only its values. It is not an Exception, because tests may
    catch those."""


class _EnoughError(BaseException):
    """Signal that a test has requested as many calls as are allowed at once."""


class _Unknown:
    """Value of a call that has not been made yet. An operation on it is unknown too."""

    conditions = 0
    """How often an unknown value was used as a condition in this run of a test. Each time it counted as true."""

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
    """Attribute of an unknown value, under the name of a method of plain data."""

    def __call__(self, *_: object, **__: object) -> Any:
        return _Unknown()


_METHODS = {name for kind in (str, list, dict, set, bytes, int, float) for name in dir(kind)}


def _itself(self: _Unknown, *others: object) -> _Unknown:
    for other in others:
        if not isinstance(other, _Unknown):
            encoded(other, _refused)  # an object would be compared by its own methods
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
"""Modules that tests may import. None of them can execute a text, because the text may be a value of the program."""
_COMPARISONS = {
    "numpy": (
        *("allclose", "isclose", "subtract", "divide", "equal", "not_equal"),
        *("less", "less_equal", "greater", "greater_equal"),
    ),
    "numpy.testing": ("assert_allclose", "assert_almost_equal", "assert_array_almost_equal", "assert_array_equal"),
}
"""Module -> functions that treat an empty array as equal to any value that broadcasts to its shape."""
_RUNS_TEXT = {"eval", "exec", "compile", "__import__", "open", "input", "globals", "locals", "vars"}


class _Asserts(ast.NodeTransformer):
    """Replaces `assert X` by `_assert(lambda: X)`, so that a test continues if X is not known yet.

    If arrays may occur, `X == Y`, `X - Y` and the like become `_operate(lambda x, y: x == y, X, Y)`.
    """

    def __init__(self, *, arrays: bool) -> None:
        self._arrays = arrays

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        call = _called("_assert", _function((), self.visit(node.test)))
        return ast.copy_location(ast.Expr(call), node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if not self._arrays or len(node.ops) > 1:
            return node
        (other,) = node.comparators
        operation = _function(("x", "y"), ast.Compare(_loaded("x"), node.ops, [_loaded("y")]))
        return ast.copy_location(_called("_operate", operation, node.left, other), node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not self._arrays:
            return node
        operation = _function(("x", "y"), ast.BinOp(_loaded("x"), node.op, _loaded("y")))
        return ast.copy_location(_called("_operate", operation, node.left, node.right), node)


def _loaded(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _called(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_loaded(name), [*arguments], [])


def _function(names: tuple[str, ...], body: ast.expr) -> ast.Lambda:
    parameters = [ast.arg(name) for name in names]
    return ast.Lambda(ast.arguments(posonlyargs=[], args=parameters, kwonlyargs=[], kw_defaults=[], defaults=[]), body)


def _operate(operation: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """Returns the result of an operation. Raises AssertionError if only one side is an empty array, because numpy would
    return an empty result, for which `all` is true."""
    numpy = sys.modules.get("numpy")
    if numpy and any(isinstance(each, numpy.ndarray) for each in (one, other)):
        _check_sizes(one, other)
    return operation(one, other)


def _check_sizes(one: Any, other: Any) -> None:
    import numpy as np

    if isinstance(one, _Unknown) or isinstance(other, _Unknown):
        return
    with suppress(ValueError):  # a list whose rows differ in length
        if (np.size(one) == 0) != (np.size(other) == 0):
            raise AssertionError("one of the values is empty")


class Examination:
    """Tests of a problem, run without the program.

    A test runs with the known values. If it makes further calls, it continues with unknown values, and its calls are
    recorded. Then the program is asked for all of these values at once.
    """

    def __init__(self, setup: str, tests: list[str], function: str) -> None:
        """Runs the setup. Errors in the texts are raised."""
        sys.set_int_max_str_digits(0)
        sys.setrecursionlimit(DEEPEST)
        for module in _COMPARISONS:
            if all(part in "\n".join([setup, *tests]) for part in module.split(".")):
                _compare_sizes(module)
        self._setup = compile(setup, "<setup>", "exec")
        trees = [ast.parse(test) for test in tests]
        used = [node for tree in trees for node in ast.walk(tree)]
        self._functions = _functions_of(used, self._fresh(), function)
        asserts = _Asserts(arrays=any("numpy" in text for text in (setup, *tests)))
        self._tests = [compile(ast.fix_missing_locations(asserts.visit(tree)), "<test>", "exec") for tree in trees]
        self._requests: list[str] = []
        self._answers: list[Any] = []
        self._first: list[list[str]] = []
        self.plan = f"beside:{int(bool(self._functions))}"
        """`:` and the calls that each test makes first, or `beside:` if the tests need the program; see
        `rpg.rewards.asserts`."""
        needs = any(map(_needs_program, [*used, *ast.walk(ast.parse(setup))]))
        if needs or not _only_called(used, self._functions):
            return
        self._begin()
        try:
            for number in range(len(tests)):
                self._requests, self._answers = [], []
                _, self._names = self._run(number)
                self._first.append(self._requests)
        except NeedsProgramError:
            return
        self.plan = f":{_listed(map(_listed, self._first))}"

    def judge(self, values: str) -> str:
        """Runs all tests with the values of their first calls.

        Args:
            values: for each test a list, JSON.
        Returns:
            P or F for each test. If a test makes further calls: the letters so far, `:`, and a JSON list of the calls.
        """
        self._values, self._number = _read(values), 0
        self._begin()
        return self._next()

    def go_on(self, values: str) -> str:
        """Runs the test again with the values of further calls, then the following tests. Returns as `judge` does."""
        new = _read(values)
        self._answers += new[0] if len(new) == 1 and type(new[0]) is list else []
        return self._next(self._judged())

    def _next(self, said: str = "") -> str:
        """Runs the following tests. Appends their letters to `said` and returns the text."""
        while self._number < len(self._tests) and ":" not in said:
            known = self._values[self._number] if self._number < len(self._values) else []
            self._requests, self._answers = [*self._first[self._number]], known if type(known) is list else []
            said += self._judged()
        return said

    def _judged(self) -> str:
        """Runs a test. Returns P (passed), F (failed), or `:` and the further calls that it makes."""
        passed, names = False, self._names
        if len(self._answers) == len(self._requests):
            passed, names = self._run(self._number)
            if self._asked:
                return f":[{_listed(self._requests[len(self._answers) :])}]"
        self._names = names
        self._number += 1
        return "P" if passed else "F"

    def _begin(self) -> None:
        """Clears the state that tests have left."""
        self._names = self._fresh()
        self._names |= {name: partial(self._call, name) for name in self._functions}
        self._names |= {"_assert": self._assert, "_operate": _operate}

    def _fresh(self) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "tests"}
        exec(self._setup, names)
        return names

    def _run(self, number: int) -> tuple[bool, dict[str, Any]]:
        """Runs a test. Returns whether it passed, as far as that is known, and the names that it defines."""
        self._place = self._asked = _Unknown.conditions = 0
        names = dict(self._names)
        random.seed(0)  # so that it makes the same calls each time
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
        request = dumps([name, encoded(list(arguments), _refused), encoded(named or None, _refused)])
        place, self._place = self._place, self._place + 1
        if not self._asked and place < len(self._answers) and self._requests[place] == request:
            return _value_of(self._answers[place])
        if not self._asked:
            del self._requests[place:], self._answers[place:]
        elif self._asked == _MOST_UNKNOWN:
            raise _EnoughError
        self._asked += 1
        self._requests.append(request)
        return _Unknown()


def _listed(texts: Iterable[str]) -> str:
    return f"[{', '.join(texts)}]"


def _read(values: str) -> list[Any]:
    """Returns the list that a program has sent, or an empty list if it has sent anything else."""
    try:
        found = loads(values)
    except (ValueError, RecursionError):
        return []
    return found if type(found) is list else []


def _refused(_value: Any) -> Any:
    raise NeedsProgramError


def _value_of(said: Any) -> Any:
    """Returns the value of a call, or raises the exception of the call."""
    if type(said) is dict and "error" in said:
        name, text = said["error"]
        kind = getattr(builtins, str(name), None)
        kind = kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception
        if issubclass(kind, (StopIteration, StopAsyncIteration)):  # would silently end a `map` of the test
            raise RuntimeError(f"the function raised {name}: {text}")
        raise kind(text)
    return decoded(said, _OWN_MAKERS)


def _compare_sizes(module: str) -> None:
    """Makes a module's functions treat an empty and a non-empty array as unequal. Numpy treats them as equal."""
    with suppress(ImportError):
        found = importlib.import_module(module)
        for name in _COMPARISONS[module]:
            setattr(found, name, _checked(getattr(found, name)))


def _checked(compare: Callable[..., Any]) -> Callable[..., Any]:
    import numpy as np

    def plain(side: Any) -> Any:
        return side.view(np.ndarray) if isinstance(side, np.ndarray) and not side.size else side

    @wraps(compare)
    def compares(*given: Any, **named: Any) -> Any:
        sides = [*given, *(named[name] for name in ("a", "b", "x", "y", "actual", "desired") if name in named)][:2]
        _check_sizes(*sides)
        return compare(*map(plain, given), **{name: plain(each) for name, each in named.items()})

    return compares


def _array_of(parts: list[Any]) -> Any:
    """Returns an array that a program has sent. An empty array may only be compared or combined with empty ones."""
    import numpy as np

    class Empty(np.ndarray[Any, Any]):
        def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **named: Any) -> Any:
            if method == "__call__" and any(map(np.size, given)):
                raise ValueError("an empty array cannot be combined with an array that is not empty")
            plain = [each.view(np.ndarray) if isinstance(each, Empty) else each for each in given]
            return getattr(ufunc, method)(*plain, **named)

    array = MAKERS["numpy"](parts)
    return array if np.size(array) else array.view(Empty)


_OWN_MAKERS = MAKERS | {"numpy": _array_of}
"""Name of a kind -> function that rebuilds a value of the program in this process."""


def _functions_of(nodes: list[ast.AST], known: dict[str, Any], function: str) -> set[str]:
    """Returns the names of the program that tests use."""
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
    """Returns whether the node may execute a text from the program, or uses the identity of the program's objects."""
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
    """Returns whether tests only call the program's functions or pass them on, and use the values.

    A capitalised name is a class. If a call's value is dropped, the call is made for its effect on the arguments;
    within `try`, it is made for its exception.
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
