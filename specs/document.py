"""A spec as read: the experiment, where each of its fields stands in a file, and the runs that it expands to."""

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
    """Which recorded results are taken, beside those of this very spec and code, and which of those are not."""

    accept_code: bool = False
    """Results are taken whatever code has made them."""
    fresh: tuple[str, ...] = ()
    """The stages whose results are made anew."""
    asked_at_ns: int = 0
    """When that was asked for, ns since 1970: what was made since then is fresh."""

    def since_of(self, stage: str) -> int:
        """The time from which on a stage's result counts, ns since 1970; 0: whenever it was made."""
        return self.asked_at_ns if stage in self.fresh else 0


@dataclass(frozen=True)
class Document:
    """An experiment with the places its fields come from. Frozen as JSON, it needs none of its files any more."""

    experiment: Experiment
    """The base configuration, matrix and seeds included."""
    source: dict[str, Any]
    """What the files say, merged, paths absolute. A cell starts from it, so published settings follow its objective."""
    positions: Positions
    warnings: tuple[Issue, ...] = ()
    """What the experiment says without effect or can hardly mean, each at its place."""
    reuse: Reuse = Reuse()
    """Which recorded results are taken; no part of the spec."""

    def locate(self, issue: Issue, values: Mapping[str, Any] | None = None) -> Issue:
        """The issue with file, line and snippet, from its path or the nearest ancestor that stands in the file.

        Args:
            values: of the matrix in the run that has the issue: what these give is at the matrix's line.
        """
        place = None if issue.file else varied_place(self.experiment.matrix, values or {}, issue.path)
        at = nearest_position(place, self.positions) if place else None
        return placed(issue, at) if at else locate(issue, self.positions)

    def with_values(self, values: Mapping[str, Any], at: Position) -> "Document":
        """The document with fields set by their dotted paths, checked like a file. Raises SpecError.

        Args:
            values: path -> value, e.g. {"objective.kl_coef": 0.01}.
            at: the position of these values, which issues with them are given.
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
        """Plain data that `from_json` reads; `experiment` is the resolved form, for other readers."""
        return {
            "source": self.source,
            "experiment": self.experiment.model_dump(mode="json"),
            "positions": plain_positions(self.positions),
            "warnings": [asdict(warning) for warning in self.warnings],
            **({"reuse": asdict(self.reuse)} if self.reuse != Reuse() else {}),
        }

    @classmethod
    def recorded(cls, path: FilePath) -> "Document | None":
        """The frozen document of a run (document.json) or an experiment (spec.json); None: there is none. Errors are as
        of `from_json`."""
        data = read_document(path)
        return cls.from_json(data) if data else None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Document":
        """The document that `to_json` wrote. Raises SpecError where this version's schema no longer takes it."""
        positions = read_positions(data["positions"])
        warnings = tuple(read_issue(plain) for plain in data["warnings"])
        source = _with_earlier_precision(data["source"], data["experiment"])
        asked = data.get("reuse", {})
        reuse = Reuse(**asked | {"fresh": tuple(asked["fresh"])}) if asked else Reuse()
        return cls(experiment_of(base_of(source), positions), source, positions, warnings, reuse)


def _with_earlier_precision(source: dict[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """A frozen document's source, with the float32 that it was resolved to written out where `device: cuda` means
    bfloat16 today: what was begun in float32 goes on in it."""
    precision = resolved["training"].get("precision")  # none where nothing is trained
    in_float32 = resolved["resources"]["device"] == "cuda" and precision == "float32"
    return with_values(source, {"training.precision": "float32"}) if in_float32 else source


def _leads_to(path: str, place: Path) -> bool:
    """Whether the dotted path is that of the place or of a section around it."""
    return place[: len(split(path))] == split(path)


def checked(source: dict[str, Any], positions: Positions) -> Document:
    """The document of a source, its runs checked one by one. Raises SpecError with every issue, in file order."""
    experiment = experiment_of(base_of(source), positions)
    issues, warnings = check_cells(source, experiment, positions)
    refuse(issues, positions)
    warnings = [*warnings, *multiplied_by_another_file(experiment.matrix, positions)]
    return Document(experiment, source, positions, tuple(in_file_order(locate(each, positions) for each in warnings)))


def experiment_of(data: Mapping[str, Any], positions: Mapping[Path, Position]) -> Experiment:
    """The experiment that plain data describes. Raises SpecError with every issue, at its position where it has one.

    A run's resolved spec has no positions. It is refused where a package is missing that it needs.
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
    """What the matrix calls the cell; empty where it gives no labels."""
    seed: int
    experiment: Experiment
    """The run's spec: matrix None, this seed alone."""


def expand(document: Document) -> list[Cell]:
    """The runs in the order of the file: product (last path fastest), then the rows of zip, then the seeds."""
    cells: list[Cell] = []
    for values in combinations(document.experiment.matrix):
        experiment = experiment_of(cell_source(document.source, values), document.positions)
        label = cell_label(document.experiment.matrix, values)
        for seed in document.experiment.seeds:
            cells.append(Cell(values, label, seed, experiment.model_copy(update={"seeds": (seed,)})))
    return cells
