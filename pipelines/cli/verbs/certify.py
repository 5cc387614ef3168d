"""rpg certify: what every objective's gradient is, by enumeration."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from rpg.certificate.certificate import Certificate

    Named = tuple[str, dict[int, Certificate]]


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

    torch.set_num_threads(1)  # tensors of some kilobytes: threads would wait for each other longer than they work
    headings = _catalogue() if file is None else {str(file): _of_spec(file, overrides or [])}
    certificates = {
        heading: [row for name, by_steps in items for row in by_step(name, by_steps)]
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
    """Heading -> (name, certificates) of every objective there is."""
    from pipelines.cli.certificate_table import by_kind
    from rpg.certificate.catalogue import catalogue
    from rpg.certificate.certificate import certify_over_training

    return {
        name: [(label, certify_over_training(objective)) for label, objective in rows]
        for heading, items in catalogue().items()
        for name, rows in by_kind(heading, items).items()
    }


def _of_spec(file: Path, overrides: list[str]) -> "list[Named]":
    """The certificates of a spec's runs, each once, by the name of the first cell that has it."""
    import json

    from pipelines.report.evidence import cell_labels
    from rpg.certificate.catalogue import label
    from rpg.certificate.certificate import certify_experiment, turns_of
    from rpg.certificate.coverage import not_covered
    from specs.document import expand
    from specs.loader import load_document

    cells = expand(load_document(file, overrides))
    left = [not_covered(cell.experiment) for cell in cells]
    varied = [
        {path: value for path, value in cell.values.items() if path.startswith(("objective", *left_out))}
        for cell, left_out in zip(cells, left, strict=True)
    ]
    named: dict[tuple[str, str, str], Named] = {}
    for cell, left_out, short in zip(cells, left, cell_labels(varied), strict=True):
        objective = cell.experiment.objective
        key = objective.model_dump_json(), turns_of(cell.experiment), json.dumps(left_out, sort_keys=True)
        if key not in named:
            named[key] = cell.label or short or label(objective), certify_experiment(cell.experiment)
    return list(named.values())
