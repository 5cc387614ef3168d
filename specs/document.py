"""Document: a spec file as read, its Experiment, and where each of its lines stands."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specs.errors import Problem, SpecError
from specs.positions import Position, Positions, in_file_order, locate
from specs.schema.experiment import Experiment
from specs.translate import parse


@dataclass(frozen=True)
class Document:
    """An experiment with the places its fields come from. Frozen as JSON, it needs none of its files any more."""

    experiment: Experiment
    """The base configuration, matrix and seeds included."""
    source: dict[str, Any]
    """What the files say, merged, paths absolute. A cell starts from it, so that published settings follow its objective."""
    positions: Positions
    warnings: tuple[Problem, ...] = ()
    """Located."""

    def locate(self, problem: Problem) -> Problem:
        """The problem with file, line and snippet, from its path or the nearest ancestor that stands in the file."""
        return locate(problem, self.positions)

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
        warnings = tuple(Problem(**{**item, "path": tuple(item["path"])}) for item in data["warnings"])
        return cls(validated(data["source"], positions), data["source"], positions, warnings)


def validated(source: dict[str, Any], positions: Positions) -> Experiment:
    """The base configuration of a source. Raises SpecError with every problem, located, in file order."""
    from specs.expand import base_values, with_values

    experiment, problems = parse(Experiment, with_values(source, base_values(source)))
    if problems:
        raise SpecError(*in_file_order([locate(problem, positions) for problem in problems]))
    assert isinstance(experiment, Experiment)
    return experiment
