"""Lookup of the class that a name in a spec refers to: a built-in one, or one that an installed package offers.

Classes come in kinds, such as the rewards; a kind is an open section of the schema, `specs.schema.base.OpenSection`. A
kind's built-in classes are the modules of one package, named as in specs; an installed package offers others as entry
points of the kind's group. Installed packages are searched, which takes some 50 ms, only for names that are not built
in. Only the module of the requested class is imported.
"""

import difflib
import importlib
import inspect
import json
import pkgutil
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from specs.errors import Issue, IssueError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


Kind = type[Any]
"""A class with `tag`, `group`, `package` and `distribution` (see OpenSection), or one of its variants."""


def find_variant(kind: Kind, name: Any) -> Kind:
    """Returns the variant of this name.

    Raises:
        IssueError: no variant has the name, or its package is broken; the path is that of the tag.
    """
    if name in our_names(kind.package):
        return _ours(kind, name)
    offers = [entry for entry in _entry_points(kind.group, tuple(sys.path)) if entry.name == name]
    if not offers:
        raise _unknown(kind, name)
    if len(offers) > 1:
        packages = " and ".join(_package_of(entry) for entry in offers)
        raise _at_tag(kind, name, f"two packages offer this {kind.tag}: {packages}", "uninstall one of them")
    return _loaded(kind, offers[0])


def is_offered(kind: Kind, name: Any) -> bool:
    """Returns whether an installed package offers a variant of this name."""
    return any(entry.name == name for entry in _entry_points(kind.group, tuple(sys.path)))


def variants(kind: Kind, *, installed: bool = True) -> dict[str, Kind]:
    """Returns name -> variant: built-in ones, then those of installed packages that can be loaded."""
    known = {name: _ours(kind, name) for name in our_names(kind.package)}
    for entry in _entry_points(kind.group, tuple(sys.path)) if installed else ():
        try:
            known.setdefault(entry.name, find_variant(kind, entry.name))
        except IssueError:
            continue  # reported when a spec names it
    return known


@lru_cache
def our_names(package: str) -> tuple[str, ...]:
    """Returns the names of the package's modules, without importing them. Empty without a package: then all variants
    are in the schema."""
    if not package:
        return ()
    return tuple(sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)))


def _ours(kind: Kind, name: str) -> Kind:
    module = importlib.import_module(f"{kind.package}.{name}")
    (variant,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, kind) and value.__module__ == module.__name__
    )
    return variant


@lru_cache
def _entry_points(group: str, _path: tuple[str, ...]) -> tuple["EntryPoint", ...]:
    """Returns the entry points of all packages on the path. The path is an argument so that a new path is searched
    again."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=group))


def _package_of(entry: "EntryPoint") -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "a package without a name"


def _loaded(kind: Kind, entry: "EntryPoint") -> Kind:
    package = _package_of(entry)
    try:
        variant: Any = entry.load()
    except Exception as error:  # the package may do anything on import
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise _at_tag(kind, entry.name, f"{package} cannot be loaded: {reason}", "install it again") from error
    if inspect.isfunction(variant) and kind.of_function[0]:
        variant = _calling(variant, *kind.of_function, entry.name)
    if not isinstance(variant, type) or not issubclass(variant, kind) or inspect.isabstract(variant):
        methods = " and ".join(f"{name}()" for name in sorted(getattr(kind, "__abstractmethods__", ())))
        hint = f"an entry point of {kind.group} names a subclass of {kind.__module__}.{kind.__name__} with {methods}"
        raise _at_tag(kind, entry.name, f"{package} offers something else: {entry.value}", hint)
    offered: Kind = variant
    if offered.__module__.startswith(f"{kind.package}.") or offered.distribution not in ("", package):
        raise _at_tag(
            kind,
            entry.name,
            f"{package} offers a {kind.tag} of another package: {entry.value}",
            "offer a subclass of it",
        )
    offered.distribution = package
    return offered


@lru_cache
def _calling(function: Any, module: str, base: str, name: str) -> Kind:
    """Returns the variant that calls a function, the same class each time."""
    called: Kind = getattr(importlib.import_module(module), base)
    return type(name, (called,), {"function": staticmethod(function), "__module__": function.__module__})


def _unknown(kind: Kind, name: Any) -> IssueError:
    packages = {entry.name: _package_of(entry) for entry in _entry_points(kind.group, tuple(sys.path))}
    known = [*our_names(kind.package), *packages]
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean `{close[0]}`? " if close else ""
    hint += f"a package with an entry point in `{kind.group}` adds another"
    allowed = ", ".join(f"{each} ({packages[each]})" if each in packages else each for each in known)
    return _at_tag(kind, name, f"unknown {kind.tag}", hint, allowed)


def _at_tag(kind: Kind, name: Any, message: str, hint: str, allowed: str = "") -> IssueError:
    given = json.dumps(name, ensure_ascii=False, default=str)
    return IssueError(Issue(message, (kind.tag,), given, allowed, hint))
