"""The origin of each value of a run's spec: a line of a file, an override, the matrix, a published setting, or a
default."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specs.cells import cell_source, varied_place
from specs.document import Document
from specs.errors import Path, Position, nearest_position
from specs.schema.experiment import Experiment, with_published
from specs.schema.fields import says, split
from specs.schema.objective import PublishedObjective

_OVERRIDE = "--set"
Kind = Literal["file", "set", "matrix", "published", "default"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of one value of a run's spec."""

    path: Path
    """Path of the value in the spec. A list of plain values is one value."""
    kind: Kind
    """file: a spec file, a file that it extends, or a study's file. set: `--set`. matrix: the run's cell or seed.
    published: the objective's published setting. default: the schema's default."""
    file: str = ""
    """Path of the file as the user named it; empty if the value is in no file."""
    line: int = 0
    """Line number, from 1; 0 if it is not in a file."""

    def to_json(self) -> list[Any]:
        """Returns [path, kind, file, line]."""
        return [list(self.path), self.kind, self.file, self.line]


def origins_of(document: Document, values: Mapping[str, Any], experiment: Experiment) -> list[Origin]:
    """Returns the origin of each value of a run's spec, in the spec's order.

    Args:
        values: the matrix's values in this run, by dotted path.
        experiment: the run's spec.
    """
    given = cell_source(document.source, values)
    completed = with_published(given)
    in_matrix = [(split(path), _matrix_place(document, values, split(path))) for path in values]
    of_cells: Kind = "matrix" if experiment.trains else "file"  # an evaluation lists its models
    origins = []
    for path in _leaves(experiment.model_dump(mode="json", exclude={"matrix"}), ()):
        if not says(given, path):
            is_published = says(completed, path) or _is_rivals(experiment, path)
            origins.append(Origin(path, "published" if is_published else "default"))
            continue
        place = next((place for varied, place in in_matrix if path[: len(varied)] == varied), None)
        varies = place is not None or path[0] == "seeds"
        place = place or nearest_position(path, document.positions) or Position("", 0, "")
        if place.file.startswith(_OVERRIDE):
            origins.append(Origin(path, "set"))
        else:
            origins.append(Origin(path, of_cells if varies else "file", place.file, place.line))
    return origins


def _is_rivals(experiment: Experiment, path: Path) -> bool:
    """Returns whether the field belongs to a published objective, whose defaults are its published settings."""
    return path[0] == "objective" and isinstance(experiment.objective, PublishedObjective)


def _matrix_place(document: Document, values: Mapping[str, Any], path: Path) -> Position | None:
    """Returns the position, in the matrix, of a cell's value for a path."""
    place = varied_place(document.experiment.matrix, values, path)
    return nearest_position(place, document.positions) if place else None


def _leaves(value: Any, path: Path) -> Iterator[Path]:
    """Yields the paths of the values. A list is one value unless it contains mappings."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    elif isinstance(value, list) and any(isinstance(child, Mapping) for child in value):
        for index, child in enumerate(value):
            yield from _leaves(child, (*path, index))
    else:
        yield path
