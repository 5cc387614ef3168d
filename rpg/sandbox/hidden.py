"""Hides packages with problems or scorers, and downloaded data sets, from processes that run a policy's text.

The packages are this product, reasoning-gym, and each installed package that provides a source or a reward. A policy
that imports one could regenerate the evaluation set from a guessed seed.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path

_DISTRIBUTIONS = ("rpg-experiments", "reasoning-gym")
_MODULES = ("rpg", "specs", "storage", "pipelines", "reasoning_gym")
_GROUPS = ("rpg.data", "rpg.rewards")
_LIBRARIES = tuple(
    f"{inside}{library}"
    for inside in ("", "local/", "envs/*/", "pkgs/*/")
    for library in ("lib*/python3*/*-packages", "site-packages")
)
"""Package directories, relative to a directory that a process may read: those of an environment, of the system, and of
conda."""


def hidden(shown: Iterable[Path]) -> list[Path]:
    """Returns the real paths of the packages and data sets, and of the packages' copies below `shown`."""
    return sorted(path for path in {*_installed()[0], *_copies(tuple(shown)), *_downloads()} if path.exists())


@lru_cache(maxsize=1)
def _installed() -> tuple[frozenset[Path], frozenset[str]]:
    """Returns the paths of the packages that this interpreter finds, and their import names."""
    entries = [entry for group in _GROUPS for entry in entry_points(group=group)]
    found = [entry.dist for entry in entries if entry.dist]
    for name in _DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found.append(distribution(name))
    modules = {*_MODULES, *(entry.module.partition(".")[0] for entry in entries)}
    paths = {*(path for each in found for path in _files(each)), *(path for name in modules for path in _places(name))}
    if sys.pycache_prefix:
        paths.add(Path(sys.pycache_prefix))
    return frozenset(path.resolve() for path in paths), frozenset(modules)


def _files(package: Distribution) -> Iterator[Path]:
    """Yields the files and directories that the package has installed. In shared directories, yields only its files."""
    for file in package.files or ():
        alone = len(file.parts) == 1 or file.parts[0] in ("..", "__pycache__")
        yield Path(str(package.locate_file(file if alone else file.parts[0])))


def _places(module: str) -> Iterator[Path]:
    """Yields the file of a module, or the directories of a package."""
    with suppress(ImportError, ValueError):  # not installed, or an artificial module of a test
        if spec := find_spec(module):
            yield from map(Path, spec.submodule_search_locations or [spec.origin or ""])


@lru_cache(maxsize=16)
def _copies(shown: tuple[Path, ...]) -> frozenset[Path]:
    """Returns copies of the same packages below these directories, for other interpreters or environments."""
    ours = {"specs", "storage", "pipelines"}  # common words, which other packages may use as names
    names = [name for name in _installed()[1] if name not in ours]
    patterns = [pattern for name in names for pattern in (name, f"{name}.py", f"{name}-*.dist-info")]
    places = {place for path in shown for library in _LIBRARIES for place in path.glob(library)}
    return frozenset(found.resolve() for place in places for pattern in patterns for found in place.glob(pattern))


def _downloads() -> Iterator[Path]:
    """Yields the directories of the Hub's data sets."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    yield Path(os.environ.get("HF_HOME") or cache / "huggingface").resolve()
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        if os.environ.get(name):
            yield Path(os.environ[name]).resolve()
