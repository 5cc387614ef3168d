"""Warnings about published settings that differ between the cells of a matrix although no file varies them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specs.errors import Issue, Path, dotted
from specs.reading.validate import show
from specs.schema.experiment import Experiment, Matrix
from specs.schema.fields import says, split

SECTIONS = ("objective", "advantage", "reference")
"""Sections in which left-out fields take the objective's published setting."""

OF_DIVERGENCE = ("divergence", "kl_estimator", "kl_in", "kl_weighted")
"""Fields of an objective that act only through its divergence."""


@dataclass(frozen=True)
class SpecOfCell:
    """A cell of a matrix."""

    source: Mapping[str, Any]
    """The spec as written, with the cell's values."""
    experiment: Experiment


def published_differences(cells: Sequence[SpecOfCell]) -> dict[Path, dict[str, Any]]:
    """Returns the fields whose values differ between objectives and that the spec does not write for all of them.

    Returns:
        Path -> type of the objective -> value, in the order of the cells.
    """
    differing: dict[Path, dict[str, Any]] = {}
    if len({cell.experiment.objective.type for cell in cells}) < 2:
        return {}
    fields = [dict(_fields(cell.experiment)) for cell in cells]
    for path in dict.fromkeys(path for of_cell in fields for path in of_cell):
        having = [(cell, of_cell[path]) for cell, of_cell in zip(cells, fields, strict=True) if path in of_cell]
        left_out = {cell.experiment.objective.type: value for cell, value in having if not says(cell.source, path)}
        for kind, value in left_out.items():
            if any(cell.experiment.objective.type != kind and other != value for cell, other in having):
                values: dict[str, Any] = {}
                for cell, other in having:
                    values.setdefault(cell.experiment.objective.type, other)
                differing[path] = values | left_out
                break
    return differing


def warnings_of_cells(cells: Sequence[SpecOfCell], matrix: Matrix) -> Iterator[Issue]:
    """Yields a warning, at the objective's line in the matrix, if published settings differ."""
    differing = published_differences(cells)
    axes = {path: axis for axis in ("product", "zip") for path in getattr(matrix, axis)}
    of_objective = [path for path in axes if split(path)[0] == "objective"]
    varied = next(
        (path for path in of_objective if path in ("objective", "objective.type")), next(iter(of_objective), None)
    )
    if not differing or varied is None:
        return
    yield Issue(
        "settings that the spec leaves out differ between the cells, because their objectives were published with"
        " different ones",
        path=("matrix", axes[varied], varied),
        given="; ".join(described(path, values) for path, values in differing.items()),
        hint="write the settings that should be equal; `rpg plan --resolved` shows each cell completely",
    )


def described(path: Path, values: Mapping[str, Any]) -> str:
    """Returns a text such as `advantage.scale none (rpg), group_std (grpo, dapo)`."""
    kinds: dict[str, list[str]] = {}
    for kind, value in values.items():
        kinds.setdefault(value if isinstance(value, str) else show(value), []).append(kind)
    return f"{dotted(path)} " + ", ".join(f"{value} ({', '.join(of)})" for value, of in kinds.items())


def _fields(experiment: Experiment) -> Iterator[tuple[Path, Any]]:
    """Yields the values of the sections with published settings. A list is one value."""
    has_divergence = experiment.objective.needs_reference
    for section in SECTIONS:
        for path, value in _leaves(getattr(experiment, section).model_dump(mode="json"), (section,)):
            if has_divergence or not (section == "reference" or path[1] in OF_DIVERGENCE):
                yield path, value


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value
