"""rpg certify: what every objective's gradient is, by enumeration."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from rpg.certificate.certificate import Turns
    from specs.schema.objective import Objective

    Named = tuple[str, Objective, Turns]


def certify(
    file: Annotated[
        Path | None, typer.Argument(help="An experiment spec; without one, every objective there is.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Hold the gradient of every objective (or of the spec's) against the exact one, by enumeration.

    Exit code 1 where an objective that claims to be exact is not.
    """
    if file is None and overrides:
        raise typer.BadParameter("it overrides a field of a spec: name the file", param_hint="--set")
    import json

    from specs.machine.parent import before_torch

    before_torch()
    import torch

    from pipelines.cli.certificate_table import by_step, catalogue_table
    from rpg.certificate.certificate import certify_over_training

    torch.set_num_threads(1)  # tensors of some kilobytes: threads would wait for each other longer than they work
    headings = _catalogue() if file is None else {str(file): _of_spec(file, overrides or [])}
    certificates = {
        heading: [
            row for name, objective, turns in items for row in by_step(name, certify_over_training(objective, turns))
        ]
        for heading, items in headings.items()
    }
    everything = [certificate for rows in certificates.values() for _, certificate in rows]
    if as_json:
        print(json.dumps([certificate.as_json() for certificate in everything], indent=2))
    else:
        print(catalogue_table(certificates))
    if not all(certificate.holds for certificate in everything):
        raise typer.Exit(1)


def _catalogue() -> "dict[str, list[Named]]":
    """Heading -> (name, objective) of every objective there is."""
    from pipelines.cli.certificate_table import by_kind
    from rpg.certificate.catalogue import catalogue

    return {
        name: [(label, objective, "one") for label, objective in rows]
        for heading, items in catalogue().items()
        for name, rows in by_kind(heading, items).items()
    }


def _of_spec(file: Path, overrides: list[str]) -> "list[Named]":
    """The objectives of a spec's runs, each once, by the name of the first cell that has it."""
    from pipelines.report.evidence import cell_labels
    from rpg.certificate.catalogue import label
    from rpg.certificate.certificate import turns_of
    from specs.document import expand
    from specs.loader import load_document

    objectives: dict[tuple[str, str], Named] = {}
    cells = expand(load_document(file, overrides))
    varied = [{path: value for path, value in cell.values.items() if path.startswith("objective")} for cell in cells]
    for cell, short in zip(cells, cell_labels(varied), strict=True):
        objective = cell.experiment.objective
        name = cell.label or short or label(objective)
        turns = turns_of(cell.experiment)
        objectives.setdefault((objective.model_dump_json(), turns), (name, objective, turns))
    return list(objectives.values())
