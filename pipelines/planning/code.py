"""The code that makes a stage's result: what of it is not as it was released.

The release's own code is known by its manifest, `released_code.json`: a results number for each stage, and for each
module the digests of its bytes and of its syntax tree, and what it imports. A module is as released where its tree, and
the modules that its imports lead to, are those of the manifest, in whichever file they stand: comments, docstrings and
moves change nothing. What differs is found among the modules that a stage reaches: from its entry, from the samplers
and open sections that the spec names, by imports that are read and never executed. `tools/write_code_manifest.py`
writes the manifest.
"""

import ast
import hashlib
import importlib.util
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from os.path import commonpath
from pathlib import Path
from typing import Any

from specs.machine.files import versions_of
from specs.schema.base import OpenSection, Spec
from specs.schema.data import Source
from specs.schema.experiment import Experiment

ENTRIES = {
    "data": ("rpg.data.staging",),
    "base": ("rpg.base.stage",),
    "train": ("rpg.train",),
    "evaluate": ("rpg.evaluation.stage",),
    "report": ("pipelines.report", "storage.store"),
}
"""The modules in which the work of each stage begins."""
PRODUCT = ("specs", "rpg", "storage", "pipelines")
ROOT = Path(__file__).parents[2]
"""Where the product's packages lie."""
MANIFEST = Path(__file__).with_name("released_code.json")

Differences = dict[str, str]
"""File, relative to where its package lies, or library -> digest, or version."""


@dataclass(frozen=True, slots=True)
class Module:
    """One file of code, as far as it can change a result."""

    content: str
    """Digest of its bytes."""
    tree: str
    """Digest of its syntax tree without docstrings, and without the paths from which it imports ours."""
    imports: tuple[str, ...]
    """The modules that it imports, inside functions too, or starts with `python -m`: MODULE, or MODULE NAME where it
    takes a name of it, and behind that `as OTHER`."""


@dataclass(frozen=True, slots=True)
class Release:
    """Content of the manifest."""

    version: str
    results: dict[str, int]
    """Stage -> its number, raised where its code comes to give another result for the same spec."""
    libraries: dict[str, str]
    """Version of each library that decides a score."""
    modules: dict[str, Module]
    """By name."""

    @classmethod
    def read(cls, path: Path = MANIFEST) -> "Release":
        """The release that the manifest describes."""
        plain = json.loads(path.read_text(encoding="utf-8"))
        modules = {
            name: Module(content, tree, tuple(imports)) for name, (content, tree, imports) in plain["modules"].items()
        }
        return cls(plain["version"], plain["results"], plain["libraries"], modules)


@lru_cache(maxsize=1)
def release() -> Release:
    """The release that this code is, or was edited from."""
    return Release.read()


class Code:
    """The code on this machine, each file as it is when it is first asked for.

    Args:
        root: where the product's packages lie; None: where this one does.
        released: what it is held against; None: the release's manifest.
    """

    def __init__(self, root: Path | None = None, released: Release | None = None) -> None:
        self._root = root or ROOT
        self._release = released or release()
        self._by_content = {module.content: module for module in self._release.modules.values()}
        self._by_tree: dict[str, list[str]] = {}
        for name, module in self._release.modules.items():
            self._by_tree.setdefault(module.tree, []).append(name)
        self._files: dict[str, Path | None] = {}
        self._modules: dict[str, Module] = {}
        self._differing: dict[tuple[str, ...], Differences] = {}

    def of_stage(self, stage: str, experiment: Experiment) -> Differences:
        """Differences from the release in a stage's code, and in the libraries that score.

        Of an installed package that the spec names that is every module: no manifest knows them.
        """
        return self._differences(stage, sections_of(stage, experiment), experiment)

    def of_training_data(self, experiment: Experiment) -> Differences:
        """Differences of the data stage, see `of_stage`, as far as training depends on it."""
        data = experiment.data
        sources = [*data.train, *(data.evaluation if data.overlap == "drop" else ())]
        return self._differences("data", open_sections(sources), experiment)

    def _differences(self, stage: str, sections: Iterable[OpenSection], experiment: Experiment) -> Differences:
        kinds = {type(section) for section in sections}
        entries = [*ENTRIES[stage], *sorted(kind.__module__ for kind in kinds)]
        if stage in ("train", "evaluate"):
            entries.append(f"rpg.samplers.{experiment.rollout.engine}")
        libraries = sorted({library for kind in kinds for library in kind.libraries})
        found = {library: installed(library) for library in libraries}
        others = {name: text for name, text in found.items() if text and text != self._release.libraries.get(name)}
        return self.differing(*entries) | others

    def differing(self, *entries: str) -> Differences:
        """The modules that these reach and that are not as released: file -> digest."""
        if entries not in self._differing:
            names = [name for name in sorted(self.reach(*entries)) if not self._is_as_released(name)]
            self._differing[entries] = {self.file_name(name): self._digest(name) for name in names}
        return self._differing[entries]

    def reach(self, *entries: str) -> set[str]:
        """Names of the modules that these import, directly or not, with themselves."""
        reached: set[str] = set()
        waiting = list(entries)
        while waiting:
            name = waiting.pop()
            if name and name not in reached and self._file(name):
                reached.add(name)
                imported = (each.partition(" ")[0] for each in self.module(name).imports)
                waiting += [name.rpartition(".")[0], *imported]
        return reached

    def module(self, name: str) -> Module:
        """The module of that name."""
        if name not in self._modules:
            known = self._by_content.get(digest_of(self._existing_file(name).read_bytes()))
            # What a file of another name imports is looked up again: it may have been moved with what it imports.
            self._modules[name] = known if known and name in self._release.modules else self.parsed(name)
        return self._modules[name]

    def parsed(self, name: str) -> Module:
        """The module as its file says, whatever the manifest knows."""
        file = self._existing_file(name)
        source = file.read_bytes()
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # told to whoever imports it
            return Module(digest_of(source), digest_of(source), ())
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        tops = {*PRODUCT, name.partition(".")[0]}
        ours = (each for each in _imports(tree, package) if each[0].partition(".")[0] in tops)
        found = {(self._longest_known(path), path, other) for path, other in ours}
        imports = {
            " ".join(
                [module, *([path[len(module) + 1 :]] if path != module else []), *([f"as {other}"] if other else [])]
            )
            for module, path, other in found
            if module not in ("", name)
        }
        return Module(digest_of(source), digest_of(_canonical(tree).encode()), tuple(sorted(imports)))

    def file_name(self, name: str) -> str:
        """A module's file, relative to where its package lies, with forward slashes."""
        place = name.replace(".", "/")
        return f"{place}/__init__.py" if self._existing_file(name).name == "__init__.py" else f"{place}.py"

    def _is_as_released(self, name: str) -> bool:
        module, released = self.module(name), self._release.modules.get(self._released_name(name))
        if released is None or module.tree != released.tree or name.partition(".")[0] not in PRODUCT:
            return False
        return set(self._released_imports(name)) == set(released.imports)

    def _released_name(self, name: str) -> str:
        """A module's name in the manifest, if another file than today's had it; else its own name."""
        if name in self._release.modules or not self._file(name):
            return name if self._file(name) else f"{name} (gone)"
        # Of modules that are alike (empty ones are) the one whose name ends most like this.
        alike = self._by_tree.get(self.module(name).tree, ())
        return max(alike, key=lambda other: len(commonpath([other[::-1], name[::-1]])), default=name)

    def _released_imports(self, name: str) -> list[str]:
        parts = (each.partition(" ") for each in self.module(name).imports)
        return sorted(f"{self._released_name(module)}{space}{names}" for module, space, names in parts)

    def _digest(self, name: str) -> str:
        return digest_of(json.dumps([self.module(name).tree, self._released_imports(name)]).encode())

    def _longest_known(self, name: str) -> str:
        """The longest beginning of a dotted name that is a module; empty where none is."""
        while name and not self._file(name):
            name = name.rpartition(".")[0]
        return name

    def _existing_file(self, name: str) -> Path:
        file = self._file(name)
        assert file is not None, name
        return file

    def _file(self, name: str) -> Path | None:
        """Where a module lies; None where there is none, or it is not written in Python."""
        if name not in self._files:
            top, *rest = name.split(".")
            places = [self._root / top] if top in PRODUCT else _places(top)
            files = [place.joinpath(*rest) for place in places]
            candidates = [path for file in files for path in (file / "__init__.py", file.with_name(f"{file.name}.py"))]
            self._files[name] = next((path for path in candidates if path.is_file()), None)
        return self._files[name]


def sections_of(stage: str, experiment: Experiment) -> Iterator[OpenSection]:
    """The sections with code of their own whose work a stage does."""
    data = experiment.data
    scoring = list(open_sections([experiment.rollout, experiment.reward]))
    measures = bool(experiment.evaluation.every_steps)
    parts: dict[str, Iterable[OpenSection]] = {
        "data": _without_rewards([*data.train, *data.evaluation]),
        "base": open_sections([experiment.model, experiment.warm_up]),
        "train": [*scoring, *_without_sources((*data.train, *(data.evaluation if measures else ())))],
        "evaluate": [*scoring, *_without_sources(data.evaluation)],
    }
    yield from parts.get(stage, ())


def open_sections(value: Any) -> Iterator[OpenSection]:
    """The sections with code of their own in a spec, or in any part of it."""
    if isinstance(value, OpenSection):
        yield value
    if isinstance(value, Spec):
        value = [getattr(value, name) for name in type(value).model_fields]
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from open_sections(item)


def _without_rewards(sources: Iterable[Source]) -> Iterator[OpenSection]:
    """Sections that make the sources' problems. What scores them is the affair of later stages."""
    for source in sources:
        yield from open_sections(source.model_copy(update={"reward": None}))


def _without_sources(sources: Iterable[Source]) -> Iterator[OpenSection]:
    """Sections that score the sources' problems. What makes the problems is the data stage's."""
    return (section for section in open_sections(sources) if not isinstance(section, Source))


@lru_cache
def installed(library: str) -> str:
    """The version of an installed library, of `python` that of the interpreter; empty where there is none."""
    if library == "python":
        return ".".join(map(str, sys.version_info[:2]))
    return versions_of(library).get(library, "")


@lru_cache
def _places(package: str) -> tuple[Path, ...]:
    """Where an installed top-level package lies, or a module without its suffix. It is not imported."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ()
    if found is None:
        return ()
    if found.submodule_search_locations:
        return tuple(map(Path, found.submodule_search_locations))
    return (Path(found.origin).with_suffix(""),) if found.has_location and found.origin else ()


def digest_of(content: bytes) -> str:
    """The first 64 bits of SHA-256, hexadecimal."""
    return hashlib.sha256(content).hexdigest()[:16]


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """The paths that a module imports, or that it starts with `python -m`, each with the name that `as` gives it.

    What is for type checkers alone is none.
    """
    for child in ast.iter_child_nodes(tree):
        match child:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                children: list[ast.stmt] = child.orelse
                for each in children:
                    yield from _imports(ast.Module([each], []), package)
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


def _canonical(node: Any) -> str:
    """A syntax tree as text, the same in all versions of Python and without what changes no result.

    Left out are docstrings and what stands for no value. Imports of ours come first in their block, sorted, without the
    modules that they are from: those are compared by what they are in the manifest.
    """
    if isinstance(node, list):
        ours = sorted({name for each in node for name in _our_names(each)})
        rest = [_canonical(each) for each in node if not _is_text(each) and not any(_our_names(each))]
        return f"[{', '.join([*(f'import {name}' for name in ours), *rest])}]"
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
        return f"{type(node).__name__}({', '.join(f'{name}={_canonical(value)}' for name, value in fields)})"
    return repr(node)


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _our_names(node: Any) -> Iterator[str]:
    """Names that a statement imports from the product: NAME, or NAME as OTHER."""
    is_ours = isinstance(node, ast.ImportFrom) and not node.level and str(node.module).partition(".")[0] in PRODUCT
    for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
        if is_ours or (isinstance(node, ast.Import) and alias.name.partition(".")[0] in PRODUCT):
            shown = alias.name if is_ours else alias.name.rpartition(".")[2]
            yield f"{shown} as {alias.asname}" if alias.asname else shown
