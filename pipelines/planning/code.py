"""The code that makes a stage's result.

It consists of the modules that the stage's entry imports inside `rpg`, the modules of `specs` that compute values, and
the sampler and the open sections that the spec names. Imports are read and never executed. `release.json` has the
values of the last release: a results number for each stage, and a digest for each stage and each part that a spec may
name. Code whose digest equals the release's does not count beside the number; `tools/write_release.py` writes the file
for a release.
"""

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipelines.planning.syntax import PRODUCT, Notes, Syntax, digest_of
from specs.machine.files import versions_of
from specs.schema.base import OpenSection, Spec
from specs.schema.data import Source
from specs.schema.experiment import Experiment

ENTRIES = {
    "data": "rpg.data.staging",
    "base": "rpg.base.stage",
    "train": "rpg.train",
    "evaluate": "rpg.evaluation.stage",
}
"""Module in which the work of each stage begins. A page is no result of code: `--fresh report` writes it again."""
COMPUTING = ("specs.schema.formula", "specs.schema.schedule")
"""Modules of `specs` that compute values. The others check and hold values that the fingerprint has already."""
ROOT = Path(__file__).parents[2]
"""Directory of the product's packages."""
RELEASE = Path(__file__).with_name("release.json")
OURS = "rpg"
"""Key of the product's own code."""

Differences = dict[str, str]
"""`rpg`, an installed package or a library -> digest, or version."""


@dataclass(frozen=True, slots=True)
class Release:
    """Content of `release.json`."""

    version: str
    results: dict[str, int]
    """Stage -> its number, raised by each change after which the same spec gives another result."""
    libraries: dict[str, str]
    """Version of each library that decides a score."""
    code: dict[str, str]
    """Digest of the code that each entry, sampler and module of an open section reaches."""


@lru_cache(maxsize=1)
def release() -> Release:
    """Returns the release that this code is, or was edited from."""
    return Release(**json.loads(RELEASE.read_text(encoding="utf-8")))


class Code:
    """The code on this machine; each file is read once, on first use.

    Args:
        root: directory of the product's packages; None: that of this package.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or ROOT
        self._files: dict[str, Path | None] = {}
        self._modules: dict[str, Syntax] = {}
        self._digests: dict[tuple[str, ...], str] = {}
        self._notes = Notes()

    def of_stage(self, stage: str, experiment: Experiment) -> Differences:
        """Returns the differences from the release in a stage's code, and in the libraries that score.

        An installed package that the spec names always counts: no release has its digest.
        """
        return self._differences(stage, sections_of(stage, experiment), experiment)

    def of_training_data(self, experiment: Experiment) -> Differences:
        """Returns the differences of the data stage (see `of_stage`) in the parts on which training depends."""
        data = experiment.data
        sources = [*data.train, *(data.evaluation if data.overlap == "drop" else ())]
        return self._differences("data", open_sections(sources), experiment)

    def digest(self, *entries: str) -> str:
        """Returns the digest of these modules and of the product's modules that they import, directly or not."""
        if entries not in self._digests:
            self._digests[entries] = self._digest_of(name for name in self.reach(*entries) if _top(name) in PRODUCT)
        return self._digests[entries]

    def reach(self, *entries: str) -> set[str]:
        """Returns the names of these modules and of those that they import, directly or not, as far as they count."""
        own = {OURS, *map(_top, entries)}
        reached: set[str] = set()
        waiting = list(entries)
        while waiting:
            name = waiting.pop()
            counts = name in COMPUTING or _top(name) in own
            if counts and name not in reached and self._file(name):
                reached.add(name)
                waiting += [self._longest_known(path) for path, _ in self._module(name).imports]
        self._notes.keep()
        return reached

    def _differences(self, stage: str, sections: Iterable[OpenSection], experiment: Experiment) -> Differences:
        if stage not in ENTRIES:
            return {}
        kinds = {type(section) for section in sections}
        modules = {kind.__module__ for kind in kinds}
        parts = sorted(name for name in modules if _top(name) in PRODUCT)
        if stage in ("train", "evaluate"):
            parts.append(f"rpg.samplers.{experiment.rollout.engine}")
        entries, known = (ENTRIES[stage], *parts), release()
        as_released = all(self.digest(entry) == known.code.get(entry) for entry in entries)
        found = {} if as_released else {OURS: self.digest(*entries)}
        for name in sorted(modules - set(parts)):
            reached = self.reach(name, *(other for other in modules if _top(other) == _top(name)))
            found[_top(name)] = self._digest_of(each for each in reached if _top(each) == _top(name))
        libraries = {library: installed(library) for kind in kinds for library in kind.libraries}
        return found | {name: it for name, it in sorted(libraries.items()) if it and it != known.libraries.get(name)}

    def _digest_of(self, names: Iterable[str]) -> str:
        """Returns the digest of modules, whatever their names: an import counts by the tree of the imported module."""
        return digest_of(json.dumps(sorted(map(self._content, names))).encode())

    def _content(self, name: str) -> list[Any]:
        imports = []
        for path, called in self._module(name).imports:
            target = self._longest_known(path)
            counts = target in COMPUTING or (_top(target) == _top(name) and name not in COMPUTING)
            taken = path.removeprefix(target).lstrip(".") or path.rpartition(".")[2]
            imports.append([self._module(target).tree if counts else "", taken, called])
        return [self._module(name).tree, sorted(imports)]

    def _module(self, name: str) -> Syntax:
        if name not in self._modules:
            file = self._file(name)
            assert file is not None, name
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            self._modules[name] = self._notes.read(file.read_bytes(), name, package)
        return self._modules[name]

    def _longest_known(self, name: str) -> str:
        """Returns the longest prefix of a dotted name that is a module; empty without such a module."""
        while name and not self._file(name):
            name = name.rpartition(".")[0]
        return name

    def _file(self, name: str) -> Path | None:
        """Returns the file of a module. None if there is no such module, or it is not written in Python."""
        if name not in self._files:
            top, *rest = name.split(".")
            places = [self._root / top] if top in PRODUCT else _places(top)
            files = [place.joinpath(*rest) for place in places]
            candidates = [path for file in files for path in (file / "__init__.py", file.with_name(f"{file.name}.py"))]
            self._files[name] = next((path for path in candidates if path.is_file()), None)
        return self._files[name]


def sections_of(stage: str, experiment: Experiment) -> Iterator[OpenSection]:
    """Yields the sections with their own code whose work a stage does."""
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
    """Yields the sections with their own code in a spec, or in any part of it."""
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
    """Yields the sections that make the sources' problems. Later stages do the scoring."""
    for source in sources:
        yield from open_sections(source.model_copy(update={"reward": None}))


def _without_sources(sources: Iterable[Source]) -> Iterator[OpenSection]:
    """Yields the sections that score the sources' problems. The data stage makes the problems."""
    return (section for section in open_sections(sources) if not isinstance(section, Source))


@lru_cache
def installed(library: str) -> str:
    """Returns the version of an installed library, for `python` that of the interpreter; empty if it is
    not installed."""
    if library == "python":
        return ".".join(map(str, sys.version_info[:2]))
    return versions_of(library).get(library, "")


@lru_cache
def _places(package: str) -> tuple[Path, ...]:
    """Returns the paths of an installed top-level package, or of a module without its suffix. Does not import it."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ()
    if found is None:
        return ()
    if found.submodule_search_locations:
        return tuple(map(Path, found.submodule_search_locations))
    return (Path(found.origin).with_suffix(""),) if found.has_location and found.origin else ()


def _top(name: str) -> str:
    return name.partition(".")[0]
