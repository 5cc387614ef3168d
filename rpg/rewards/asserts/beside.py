"""Tests that need the program itself, such as its classes, and run in one process with it.

It runs in the sandbox, where our packages are not visible. It imports only the standard library and its neighbours.
"""

import ast
import builtins
import itertools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from types import ModuleType
from typing import Any

from rpg.rewards.asserts.values import SHORT_SECONDS, decoded, encoded, loads, reply, write

_exit, _urandom = os._exit, os.urandom
"""Functions that are bound here before a program can replace them."""


class _PlainSides(ast.NodeTransformer):
    """Rewrites comparisons of tests with a literal: the other side X becomes `_plain(X)`, the literal becomes
    `_literal(N)`. This hides the literals, because a function can inspect its caller."""

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


def run() -> None:
    """Reads tests and a program from standard input, and runs all tests in one process with the program. Replies P
    (passed) or F (failed) for each."""
    request = loads(sys.stdin.buffer.read())
    tests = Beside(*request.pop("given"))  # the program sees this frame
    begun = monotonic()
    tests.start(request["program"])
    if monotonic() - begun > SHORT_SECONDS:
        write(1, b"\0")
    said = ""
    for number in range(tests.count):
        said += tests.judge(number)
        write(1, b"\0")
    reply(said)


class Beside:
    """Tests that run in one process with the program, a child of a process that has not loaded the program.

    Builtins and literals of the tests are bound before the program is loaded. The child reports a passed test by a word
    that its parent checks; its output and its exit code are ignored.
    """

    def __init__(self, setup: str, tests: list[str], own_builtins: bool) -> None:
        """Runs the setup and compiles the tests.

        Args:
            own_builtins: whether names of builtins mean Python's own in tests, and not functions of the program.
        """
        self._main = ModuleType("__main__")
        exec(compile(setup, "<setup>", "exec"), self._main.__dict__)
        trees = [ast.parse(test) for test in tests]
        sides = _PlainSides()
        self._tests = [compile(ast.fix_missing_locations(sides.visit(tree)), "<test>", "exec") for tree in trees]
        self.count = len(tests)
        self._own: dict[str, Any] = {
            "_plain": _plain,
            "_literal": sides.literals.__getitem__,
            "__builtins__": dict(vars(builtins)),
        }
        self._builtins = set(vars(builtins)) if own_builtins else set()

    def start(self, program: str) -> None:
        """Starts the child. Raises SystemExit if the program cannot be loaded."""
        compiled = compile(program, "<program>", "exec")
        sys.stdout.flush()
        sys.modules["linecache"].cache.clear()
        self._word = _urandom(16)
        orders, self._orders = os.pipe()
        self._words, words = os.pipe()
        if os.fork() == 0:
            passed = map(write, itertools.repeat(words), itertools.repeat(self._word)).__next__
            self._word = b""
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(2, 1)
                os.closerange(3, min(orders, words))
                os.closerange(min(orders, words) + 1, max(orders, words))
                os.closerange(max(orders, words) + 1, os.sysconf("SC_OPEN_MAX"))
                self._work(compiled, partial(os.read, orders, 4), passed, partial(write, words, b"-"))
            finally:
                _exit(1)
        os.close(orders)
        os.close(words)
        if not self._has_passed():
            sys.exit("the program cannot be loaded")

    def judge(self, number: int) -> str:
        """Returns P if a test passes, otherwise F."""
        with suppress(BrokenPipeError):
            write(self._orders, number.to_bytes(4, "little"))
        return "P" if self._has_passed() else "F"

    def _has_passed(self) -> bool:
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
