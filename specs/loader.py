"""YAML text -> Experiment, or SpecError with everything that is wrong, each with its line."""

from collections.abc import Iterable
from pathlib import Path as FilePath

from specs.document import Document, validated
from specs.errors import Problem, SpecError
from specs.fields import split
from specs.positions import Position
from specs.schema.experiment import Experiment
from specs.tree import assign, positions_of
from specs.yaml_text import Node, parse_bytes, parse_text

__all__ = ["Document", "load_document", "load_experiment"]


def load_document(path: str | FilePath, overrides: Iterable[str] = ()) -> Document:
    """Reads a spec file, with `path.to.field=value` overrides. Raises SpecError with every problem as file:line."""
    root = _read(FilePath(path))
    for override in overrides:
        root = _override(root, override)
    source = root.plain()
    positions = positions_of(root)
    return Document(validated(source, positions), source, positions)


def load_experiment(path: str | FilePath, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment that a spec file describes. Raises SpecError with every problem as file:line."""
    return load_document(path, overrides).experiment


def _read(path: FilePath) -> Node:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(Problem(f"cannot be read: {error.strerror}", file=str(path))) from None
    return parse_bytes(data, str(path))


def _override(root: Node, override: str) -> Node:
    name, _, text = override.partition("=")
    at = Position(f"--set {override}", 0, "")
    node = parse_text(text, lambda _line: at)
    return assign(root, split(name.strip()), Node(node.value if node else None, at))
