"""matrix x seeds -> the runs' specs."""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specs.document import Document
from specs.errors import SpecError
from specs.fields import split
from specs.positions import Path, in_file_order
from specs.schema.experiment import Experiment
from specs.translate import parse


@dataclass(frozen=True)
class Cell:
    """One run of an experiment."""

    values: dict[str, Any]
    """Matrix path -> this run's value; empty without a matrix."""
    seed: int
    experiment: Experiment
    """The run's spec: matrix None, this seed alone."""


def expand(document: Document) -> list[Cell]:
    """The runs in the order of the file: product (last path fastest), then the rows of zip, then the seeds."""
    cells: list[Cell] = []
    for values in combinations(document.experiment.matrix.model_dump() if document.experiment.matrix else {}):
        source = {key: value for key, value in document.source.items() if key != "matrix"}
        experiment, problems = parse(Experiment, with_values(source, values))
        if problems:
            raise SpecError(*in_file_order([document.locate(problem) for problem in problems]))
        for seed in document.experiment.seeds:
            cells.append(Cell(values, seed, experiment.model_copy(update={"seeds": (seed,)})))
    return cells


def combinations(matrix: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values of each cell; one empty cell without a matrix."""
    product, rows = matrix.get("product") or {}, matrix.get("zip") or {}
    cells = []
    for values in itertools.product(*product.values()):
        for row in zip(*rows.values(), strict=True) if rows else [()]:
            cell = {**dict(zip(product, values, strict=True)), **dict(zip(rows, row, strict=True))}
            if not any(_agrees(cell, entry) for entry in matrix.get("exclude") or ()):
                cells.append(cell)
    return cells


def _agrees(cell: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    return all(path in cell and cell[path] == value for path, value in entry.items())


def with_values(source: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the source with values set at their dotted paths; mappings on the way are made where there are none."""
    result = copy.deepcopy(dict(source))
    for path, value in values.items():
        _set(result, split(path), copy.deepcopy(value))
    return result


def _set(target: Any, path: Path, value: Any) -> None:
    for part, _ in itertools.pairwise(path):
        if isinstance(target, list):
            target = target[int(part)]
            continue
        if not isinstance(target.get(part), (dict, list)):
            target[part] = {}
        target = target[part]
    target[path[-1]] = value


def base_values(source: Mapping[str, Any]) -> dict[str, Any]:
    """What the matrix alone supplies, as its first cell has it: the file need not say it twice."""
    return {}
