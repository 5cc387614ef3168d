"""A spec as read: the experiment, the place of each field in a file, and the runs that it expands to."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from specs.cells import (
    base_of,
    cell_label,
    cell_source,
    check_cells,
    combinations,
    multiplied_by_another_file,
    varied_place,
    with_values,
)
from specs.documents.reading import read_document
from specs.errors import (
    Issue,
    Path,
    Position,
    Positions,
    SpecError,
    in_file_order,
    locate,
    nearest_position,
    placed,
    plain_positions,
    read_issue,
    read_positions,
    refuse,
)
from specs.model_evaluation import schema_of
from specs.reading.validate import parse
from specs.schema.experiment import Experiment
from specs.schema.fields import no_such_item, split, unknown


@dataclass(frozen=True)
class Reuse:
    """Choice of recorded results to reuse although they are not from exactly this spec and code, and of results to
    compute again."""

    accept_code: bool = False
    """Whether results of any code version are reused."""
    fresh: tuple[str, ...] = ()
    """Stages whose results are computed again."""
    asked_at_ns: int = 0
    """Time of the request, ns since 1970. Newer results count as fresh."""

    def since_of(self, stage: str) -> int:
        """Returns the time from which on a stage's results are reused, ns since 1970; 0 for results of any age."""
        return self.asked_at_ns if stage in self.fresh else 0


@dataclass(frozen=True)
class Document:
    """An experiment with the places of its fields. Once frozen as JSON, it no longer needs its files."""

    experiment: Experiment
    """Base configuration, including matrix and seeds."""
    source: dict[str, Any]
    """Merged data of the files, with absolute paths. Each cell starts from it, so that published settings follow the
    cell's objective."""
    positions: Positions
    warnings: tuple[Issue, ...] = ()
    """Warnings about settings that have no effect or are probably mistakes, each at its place."""
    reuse: Reuse = Reuse()
    """Choice of recorded results to reuse. It is not part of the spec."""

    def locate(self, issue: Issue, values: Mapping[str, Any] | None = None) -> Issue:
        """Returns the issue with file, line and snippet of its path, or of the nearest ancestor in the file.

        Args:
            values: the matrix's values in the run with the issue; issues with these values are placed at the matrix's
                line.
        """
        place = None if issue.file else varied_place(self.experiment.matrix, values or {}, issue.path)
        at = nearest_position(place, self.positions) if place else None
        return placed(issue, at) if at else locate(issue, self.positions)

    def with_values(self, values: Mapping[str, Any], at: Position) -> "Document":
        """Returns the document with fields set by their dotted paths, checked like a file. Raises SpecError.

        Args:
            values: path -> value, e.g. {"objective.kl_coef": 0.01}.
            at: the position of issues with these values.
        """
        for path in values:
            parts = split(path)
            around = {other: value for other, value in values.items() if other != path and _leads_to(other, parts)}
            source = with_values(self.source, around) if around else self.source
            if issue := unknown(Experiment, parts) or no_such_item(source, parts):
                raise SpecError(replace(issue, file=at.file, line=at.line, snippet=at.snippet))
        changed = tuple(split(path) for path in values)
        positions = {
            path: place
            for path, place in self.positions.items()
            if not any(path[: len(prefix)] == prefix for prefix in changed)
        }
        return checked(with_values(self.source, values), positions | dict.fromkeys(changed, at))

    def to_json(self) -> dict[str, Any]:
        """Returns plain data that `from_json` reads. Its `experiment` is the resolved form, for other readers."""
        return {
            "source": self.source,
            "experiment": self.experiment.model_dump(mode="json"),
            "positions": plain_positions(self.positions),
            "warnings": [asdict(warning) for warning in self.warnings],
            **({"reuse": asdict(self.reuse)} if self.reuse != Reuse() else {}),
        }

    @classmethod
    def recorded(cls, path: FilePath) -> "Document | None":
        """Returns the frozen document of a run (document.json) or an experiment (spec.json); None if the file is
        missing. Raises the errors of `from_json`."""
        data = read_document(path)
        return cls.from_json(data) if data else None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Document":
        """Returns the document that `to_json` wrote. Raises SpecError if this version's schema no longer accepts it."""
        positions = read_positions(data["positions"])
        warnings = tuple(read_issue(plain) for plain in data["warnings"])
        source = _with_earlier_precision(data["source"], data["experiment"])
        asked = data.get("reuse", {})
        reuse = Reuse(**asked | {"fresh": tuple(asked["fresh"])}) if asked else Reuse()
        return cls(experiment_of(base_of(source), positions), source, positions, warnings, reuse)


def _with_earlier_precision(source: dict[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a frozen document's source. If `device: cuda` meant float32 when it was frozen and means bfloat16 today,
    float32 is written out, so that the run continues in float32."""
    precision = resolved["training"].get("precision")  # missing in evaluations
    in_float32 = resolved["resources"]["device"] == "cuda" and precision == "float32"
    return with_values(source, {"training.precision": "float32"}) if in_float32 else source


def _leads_to(path: str, place: Path) -> bool:
    """Returns whether the dotted path leads to the place or to a section that contains it."""
    return place[: len(split(path))] == split(path)


def checked(source: dict[str, Any], positions: Positions) -> Document:
    """Returns the document of a source, after a check of each run. Raises SpecError with every issue, in file order."""
    experiment = experiment_of(base_of(source), positions)
    issues, warnings = check_cells(source, experiment, positions)
    refuse(issues, positions)
    warnings = [*warnings, *multiplied_by_another_file(experiment.matrix, positions)]
    return Document(experiment, source, positions, tuple(in_file_order(locate(each, positions) for each in warnings)))


def experiment_of(data: Mapping[str, Any], positions: Mapping[Path, Position]) -> Experiment:
    """Returns the experiment that plain data describes. Raises SpecError with every issue, at its position if it has
    one.

    A run's resolved spec has no positions. It is refused if a package that it needs is missing.
    """
    experiment, issues = parse(schema_of(data), dict(data))
    refuse(issues, positions)
    assert isinstance(experiment, Experiment)
    return experiment


@dataclass(frozen=True)
class Cell:
    """One run of an experiment."""

    values: dict[str, Any]
    """Matrix path -> this run's value; empty without a matrix."""
    label: str
    """Label of the cell in the matrix; empty without labels."""
    seed: int
    experiment: Experiment
    """Spec of the run, with matrix None and this seed only."""


def expand(document: Document) -> list[Cell]:
    """Returns the runs in the order of the file: by product (the last path varies fastest), then by row of zip, then by
    seed."""
    cells: list[Cell] = []
    for values in combinations(document.experiment.matrix):
        experiment = experiment_of(cell_source(document.source, values), document.positions)
        label = cell_label(document.experiment.matrix, values)
        for seed in document.experiment.seeds:
            cells.append(Cell(values, label, seed, experiment.model_copy(update={"seeds": (seed,)})))
    return cells
