"""Which scorers only compare: read from their source, so that a new version of a library is judged by what it says."""

import ast
import builtins
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

_HARMLESS_MODULES = frozenset(
    {"calendar", "collections", "datetime", "decimal", "fractions", "itertools", "json", "math", "numpy", "re"}
    | {"random", "string", "typing"}
)
"""Modules that run no text, the names below aside."""
_NOT_BUILTINS = frozenset(
    {"__import__", "breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals", "input", "locals"}
    | {"open", "setattr", "vars"}
)
_NOT_ATTRIBUTES = frozenset({"ctypeslib", "eval", "exec", "f2py", "fromfile", "load", "memmap", "testing"})
"""Attributes of numpy above all, which also reads pickles."""
_HARMLESS_VALUES = (bool, int, float, complex, str, bytes, type(None))


@lru_cache(maxsize=256)
def only_compares(owner: type, method: str, data: frozenset[str]) -> bool:
    """Whether no call of the method can run a text as code, as far as its source tells; False in doubt.

    Followed is what the source names: the class's own methods, and functions and classes of its package. Each other
    name must be a harmless builtin, a constant, or of a module that runs no text. Nothing is imported in a function,
    no name begins with two underscores, and of `self` only methods and `data` are used: what else an instance
    holds might do anything.

    Args:
        data: attributes of an instance that hold plain values.
    """
    return all(_Reader(owner, data, where).harmless() for where in _reached(owner, data, method))


def _reached(owner: type, data: frozenset[str], method: str) -> Iterator[Any]:
    """The method, and all functions and classes of its package that it may reach; each once."""
    todo, seen = [inspect.getattr_static(owner, method)], set()
    while todo:
        found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        todo += _Reader(owner, data, found).followed


class _Reader(ast.NodeVisitor):
    """Reads the source of a function, method or class."""

    def __init__(self, owner: type, data: frozenset[str], where: Any) -> None:
        self.followed: list[Any] = []
        self._owner = owner
        self._data = data
        self._harmless = True
        plain: Any = where.__func__ if isinstance(where, staticmethod | classmethod) else where
        plain = plain.fget if isinstance(plain, property) else inspect.unwrap(plain)
        try:
            source = textwrap.dedent(inspect.getsource(plain))
            self._names = vars(sys.modules[plain.__module__])
            tree = ast.parse(source)
        except (OSError, TypeError, KeyError, AttributeError, SyntaxError):  # the last: of a lambda amid an expression
            self._harmless = False
            return
        self.visit(tree)
        bases = plain.__bases__ if isinstance(plain, type) else ()
        for base in bases:
            self._take(base)

    def harmless(self) -> bool:
        """Whether all names that it uses are harmless or followed."""
        return self._harmless

    def visit_Import(self, _node: ast.Import) -> None:
        """Counts an import in a function as harmful: its source is not known."""
        self._harmless = False

    def visit_ImportFrom(self, _node: ast.ImportFrom) -> None:
        """Counts the import as harmful, see `visit_Import`."""
        self._harmless = False

    def visit_Name(self, node: ast.Name) -> None:
        """A name of the module, a builtin or a local."""
        if node.id == "self" or (node.id.startswith("__") or node.id in _NOT_BUILTINS):
            self._harmless = False  # an instance itself is passed on; visit_Attribute takes `self.name`
        elif node.id in self._names:
            self._take(self._names[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """A method of the class, something of a module, or an attribute of a value."""
        if node.attr.startswith("__") or node.attr in _NOT_ATTRIBUTES:
            self._harmless = False
        # Of each base: `super()` may mean one that the class itself has another for.
        own = [vars(base)[node.attr] for base in self._owner.__mro__ if node.attr in vars(base)]
        for each in own:
            if isinstance(each, FunctionType | staticmethod | classmethod | property):
                self.followed.append(each)
            else:
                self._take(each)
        of = node.value
        if isinstance(of, ast.Name) and of.id == "self":
            self._harmless &= bool(own) or node.attr in self._data
            return
        module = self._names.get(of.id) if isinstance(of, ast.Name) else None
        if isinstance(module, ModuleType) and _room(module.__name__) == _room(self._owner.__module__):
            self._take(getattr(module, node.attr, None))
        else:
            self.visit(of)

    def _take(self, found: Any) -> None:
        """Follows what is of the package, and passes what is harmless."""
        if isinstance(found, tuple | list | set | frozenset):
            for each in found:
                self._take(each)
        elif isinstance(found, dict):
            self._take([*found, *found.values()])
        elif isinstance(found, _HARMLESS_VALUES):
            return
        elif isinstance(found, ModuleType):
            self._harmless &= _room(found.__name__) in _HARMLESS_MODULES
        else:
            module = getattr(found, "__module__", None) or type(found).__module__
            if _room(module) == _room(self._owner.__module__):
                plain = inspect.unwrap(found) if callable(found) else type(found)
                self.followed.append(plain)
            else:
                self._harmless &= _room(module) in _HARMLESS_MODULES or found in (object, *_BUILTINS)


_BUILTINS = [each for name, each in vars(builtins).items() if name not in _NOT_BUILTINS]


def _room(module: str) -> str:
    return module.partition(".")[0]
