"""matrix x seeds -> the runs' specs."""

from dataclasses import dataclass
from typing import Any

from specs.cells import cell_label, cell_source, combinations
from specs.document import Document
from specs.errors import SpecError
from specs.positions import in_file_order
from specs.schema.experiment import Experiment
from specs.translate import parse


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
        experiment, problems = parse(Experiment, cell_source(document.source, values))
        if problems:
            raise SpecError(*in_file_order([document.locate(problem) for problem in problems]))
        label = cell_label(document.experiment.matrix, values)
        for seed in document.experiment.seeds:
            cells.append(Cell(values, label, seed, experiment.model_copy(update={"seeds": (seed,)})))
    return cells
