"""Digest of a module's syntax tree, without the parts that cannot change a result.

Left out are comments, layout, docstrings, the messages of assertions, issues, and the text of errors and log messages:
literals that are raised, printed or logged, in calls that make an error, and in values that only these read. An error's
text stays if the policy reads it.
"""

import ast
import hashlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from specs.machine.files import DiskError, read_json, write_json
from specs.machine.own_cache import place_to_save_time

PRODUCT = ("specs", "rpg", "storage", "pipelines")
_LOGS = frozenset({"print", "say", "warn", "debug", "info", "warning", "error", "exception", "critical"})
"""Names of functions and methods whose literals only people read."""
_READ_BY_POLICY = frozenset({"ToolError", "ChatError"})
"""Errors whose texts the policy or its program reads."""
_TOOLS = "rpg.tools."
"""Package in which the policy may read the text of any error, except errors of specs."""
_TEXT = "text"
_MOST_NOTES = 5000


class Syntax(NamedTuple):
    """The parts of a module's source that decide its results."""

    tree: str
    """Digest of the tree, without imports from the product and the module's own package."""
    imports: list[tuple[str, str]]
    """Dotted paths that the module imports from the product and its own package, also inside functions, or starts with
    `python -m`; each with its name after `as`."""


class Notes:
    """Syntax of files by their content, kept in the user's cache: parsing a stage's code takes a second."""

    _read: ClassVar[dict[str, Syntax]] = {}
    _are_new: ClassVar[bool] = False

    def __init__(self) -> None:
        if not Notes._read and (path := self._path()):
            Notes._read.update({key: Syntax(tree, list(map(tuple, it))) for key, (tree, it) in read_json(path).items()})

    def read(self, source: bytes, name: str, package: str) -> Syntax:
        """Returns the syntax of a module.

        Args:
            name: the module's.
            package: the package from which its relative imports start.
        """
        key = digest_of(f"{name} {package} ".encode() + source)
        if key not in Notes._read:
            Notes._read[key], Notes._are_new = read(source, name, package), True
        return Notes._read[key]

    def keep(self) -> None:
        """Saves the results that were parsed since the last save. Nothing depends on its success."""
        if Notes._are_new and (path := self._path()):
            newest = dict(list(Notes._read.items())[-_MOST_NOTES:])
            with suppress(OSError, DiskError):
                write_json(path, newest, durable=False)
        Notes._are_new = False

    @staticmethod
    def _path() -> Path | None:
        """Returns the file of the notes for this version of the code. None if no cache directory is available."""
        return place_to_save_time("planning", "code", f"{digest_of(Path(__file__).read_bytes())}.json")


def read(source: bytes, name: str, package: str) -> Syntax:
    """Returns the syntax of a module; see `Notes.read`. Texts are left out only in the product's code."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the import reports it
        return Syntax(digest_of(source), [])
    top = name.partition(".")[0]
    imports = {(path, called) for path, called in _imports(tree, package) if path.partition(".")[0] in (*PRODUCT, top)}
    texts = _Texts(in_tools=f"{name}.".startswith(_TOOLS)).of(tree) if top in PRODUCT else set[int]()
    return Syntax(digest_of(_canonical(tree, top, texts).encode()), sorted(imports))


def digest_of(content: bytes) -> str:
    """Returns the first 64 bits of SHA-256, hexadecimal."""
    return hashlib.sha256(content).hexdigest()[:16]


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Yields the imports of a module, without those for type checkers."""
    for child in ast.iter_child_nodes(tree):
        match child:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from _imports(ast.Module(child.orelse, []), package)
                continue
            case ast.Import():
                yield from ((alias.name, alias.asname or "") for alias in child.names)
            case ast.ImportFrom():
                parts = package.split(".")[: len(package.split(".")) + 1 - child.level] if child.level else []
                start = ".".join([*parts, *([child.module] if child.module else [])])
                yield from ((f"{start}.{alias.name}", alias.asname or "") for alias in child.names)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                texts = [each.value if isinstance(each, ast.Constant) else None for each in elements]
                pairs = itertools.pairwise(texts)
                yield from ((text, "") for flag, text in pairs if flag == "-m" and isinstance(text, str))
        yield from _imports(child, package)


def _canonical(node: Any, top: str, texts: Collection[int]) -> str:
    """Returns a syntax tree as text, the same in all versions of Python.

    Args:
        top: top-level package whose imports are left out, like those of the product: `Syntax.imports` has them.
        texts: ids of the nodes that are texts for people.
    """
    if isinstance(node, list):
        parts = (_canonical(each, top, texts) for each in node if not _is_ours(each, top) and not _is_text(each))
        return f"[{', '.join(parts)}]"
    if id(node) in texts:
        return _TEXT
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
        kept = [(name, value) for name, value in fields if (type(node), name) != (ast.Assert, "msg")]
        return f"{type(node).__name__}({', '.join(f'{name}={_canonical(value, top, texts)}' for name, value in kept)})"
    return repr(node)


def _is_text(node: Any) -> bool:
    """Returns whether a statement is only a text, for example a docstring."""
    return isinstance(node, ast.Expr) and _is_literal(node.value)


def _is_literal(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_ours(node: Any, top: str) -> bool:
    """Returns whether a statement imports from the product or the module's own package."""
    if isinstance(node, ast.ImportFrom):
        return bool(node.level) or str(node.module).partition(".")[0] in (*PRODUCT, top)
    return isinstance(node, ast.Import) and all(alias.name.partition(".")[0] in (*PRODUCT, top) for alias in node.names)


class _Texts:
    """A search for the texts in a module that only people read.

    Args:
        in_tools: errors may be answers to the policy.
    """

    def __init__(self, *, in_tools: bool) -> None:
        self._in_tools = in_tools
        self._found: set[int] = set()

    def of(self, tree: ast.Module) -> set[int]:
        """Returns the ids of the nodes that are such texts."""
        for scope in ast.walk(tree):
            if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._search(list(ast.walk(scope)), scope.body)
        private = [node for node in tree.body if isinstance(node, ast.Assign) and all(map(_is_private, node.targets))]
        self._search(list(ast.walk(tree)), private)
        return self._found

    def _search(self, nodes: list[ast.AST], statements: Sequence[ast.stmt]) -> None:
        """Searches a function or module.

        Args:
            nodes: all nodes in it.
            statements: those that assign values which only errors and log messages may read.
        """
        inside = [below for node in nodes for part in self._for_people(node) for below in ast.walk(part)]
        if not inside:
            return
        shared = {name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
        reads = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        assigned = [each for statement in statements for node in ast.walk(statement) for each in _assigned(node)]
        while True:
            known = {id(node) for node in inside}
            elsewhere = shared | {node.id for node in reads if id(node) not in known}
            read_here = {node.id for node in reads if id(node) in known}
            values = [value for name, value in assigned if name in read_here - elsewhere and id(value) not in known]
            if not values:
                break
            inside += [below for value in values for below in ast.walk(value)]
        self._found |= {id(node) for node in inside if _is_literal(node)}

    def _for_people(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the parts of a node whose literals only people read."""
        match node:
            case ast.Call() if _name_of(node) == "Issue":
                self._found.add(id(node))
                yield node
            case ast.Call() if _name_of(node) in _LOGS:
                yield node
            case ast.Raise(exc=ast.expr() as error) if self._is_for_people(error):
                yield error
            case ast.Call() if _name_of(node).endswith("Error") and self._is_for_people(node):
                yield node

    def _is_for_people(self, error: ast.expr) -> bool:
        name = _name_of(error)
        return name not in _READ_BY_POLICY and (name == "SpecError" or not self._in_tools)


def _is_private(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.startswith("_")


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields the names that a statement assigns, each with its value."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            pairs = zip(targets, values, strict=False)
            yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
        case ast.AugAssign(target=ast.Name(id=name), value=value):
            yield name, value
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value


def _name_of(node: ast.expr) -> str:
    """Returns the last part of a dotted name, or of the name that a call calls."""
    called = node.func if isinstance(node, ast.Call) else node
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
