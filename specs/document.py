"""Document: a spec file as read, its Experiment, and where each of its lines stands."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specs.cells import base_of, cell_label, cell_source, check_cells, combinations, with_values
from specs.errors import Issue, Position, Positions, SpecError, in_file_order, locate
from specs.reading.validate import parse
from specs.schema.experiment import Experiment
from specs.schema.fields import no_such_item, split, unknown


@dataclass(frozen=True)
class Document:
    """An experiment with the places its fields come from. Frozen as JSON, it needs none of its files any more."""

    experiment: Experiment
    """The base configuration, matrix and seeds included."""
    source: dict[str, Any]
    """What the files say, merged, paths absolute. A cell starts from it, so published settings follow its objective."""
    positions: Positions
    warnings: tuple[Issue, ...] = ()
    """Located."""

    def locate(self, issue: Issue) -> Issue:
        """The issue with file, line and snippet, from its path or the nearest ancestor that stands in the file."""
        return locate(issue, self.positions)

    def with_values(self, values: Mapping[str, Any], at: Position) -> "Document":
        """The document with fields set by their dotted paths, checked like a file. Raises SpecError.

        Args:
            values: path -> value, e.g. {"objective.kl_coef": 0.01}.
            at: where issues with these values are said to stand.
        """
        for path in values:
            if issue := unknown(Experiment, split(path)) or no_such_item(self.source, split(path)):
                raise SpecError(dataclasses.replace(issue, file=at.file, line=at.line, snippet=at.snippet))
        changed = tuple(split(path) for path in values)
        positions = {
            path: place
            for path, place in self.positions.items()
            if not any(path[: len(prefix)] == prefix for prefix in changed)
        }
        return checked(with_values(self.source, values), positions | dict.fromkeys(changed, at))

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads; `experiment` is the resolved form, for other readers."""
        return {
            "source": self.source,
            "experiment": self.experiment.model_dump(mode="json"),
            "positions": [[list(path), at.file, at.line, at.snippet] for path, at in self.positions.items()],
            "warnings": [dataclasses.asdict(warning) for warning in self.warnings],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Document":
        """The document that `to_json` wrote. Raises SpecError where this version's schema no longer takes it."""
        positions: Positions = {
            tuple(path): Position(file, line, snippet) for path, file, line, snippet in data["positions"]
        }
        warnings = tuple(Issue(**{**item, "path": tuple(item["path"])}) for item in data["warnings"])
        return cls(_base(data["source"], positions), data["source"], positions, warnings)


def checked(source: dict[str, Any], positions: Positions) -> Document:
    """The document of a source, its runs checked one by one. Raises SpecError with every issue, in file order."""
    experiment = _base(source, positions)
    issues, warnings = check_cells(source, experiment, positions)
    if issues:
        raise SpecError(*in_file_order([locate(issue, positions) for issue in issues]))
    return Document(
        experiment, source, positions, tuple(in_file_order([locate(warning, positions) for warning in warnings]))
    )


def resolved_experiment(spec: Mapping[str, Any]) -> Experiment:
    """The experiment of a resolved spec, as a run's directory has it. SpecError where a package is missing."""
    experiment, issues = parse(Experiment, dict(spec))
    if issues:
        raise SpecError(*issues)
    assert isinstance(experiment, Experiment)
    return experiment


def _base(source: dict[str, Any], positions: Positions) -> Experiment:
    experiment, issues = parse(Experiment, base_of(source))
    if issues:
        raise SpecError(*in_file_order([locate(issue, positions) for issue in issues]))
    assert isinstance(experiment, Experiment)
    return experiment


@dataclass(frozen=True)
class Cell:
    """One run of an experiment."""

    values: dict[str, Any]
    """Matrix path -> this run's value; empty without a matrix."""
    label: str
    """What the matrix calls the cell; empty where it gives no labels."""
    seed: int
    experiment: Experiment
    """The run's spec: matrix None, this seed alone."""


def expand(document: Document) -> list[Cell]:
    """The runs in the order of the file: product (last path fastest), then the rows of zip, then the seeds."""
    cells: list[Cell] = []
    for values in combinations(document.experiment.matrix):
        experiment, issues = parse(Experiment, cell_source(document.source, values))
        if issues:
            raise SpecError(*in_file_order([document.locate(issue) for issue in issues]))
        label = cell_label(document.experiment.matrix, values)
        for seed in document.experiment.seeds:
            cells.append(Cell(values, label, seed, experiment.model_copy(update={"seeds": (seed,)})))
    return cells
