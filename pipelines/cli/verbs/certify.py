"""rpg certify: the gradient of every objective, by enumeration."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from rpg.certificate.certificate import Certificate

    Named = tuple[str, dict[int, Certificate]]


def certify(
    file: Annotated[
        Path | None, typer.Argument(help="An experiment spec; without one, all available objectives.")
    ] = None,
    overrides: Overrides = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a page with each weight over the ratio, for A of 1 and of -1."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compares the gradient of every objective (or of the spec's) with the exact one, by enumeration.

    A formula is listed beside the built-in objectives that make the same claim, with their bias and variance. Exits 1
    if an objective's claim to be exact is false, 2 if the false claim is a formula's.
    """
    if file is None and overrides:
        raise typer.BadParameter("name the spec file, of which this option overrides a field", param_hint="--set")
    import json

    from specs.machine.parent import before_torch

    before_torch()
    import torch

    from pipelines.cli.certificate_table import by_step, catalogue_table, weight_page
    from pipelines.cli.output import write_bytes

    torch.set_num_threads(1)  # on tensors of kilobytes, threads wait longer than they compute
    headings = _catalogue() if file is None else _of_spec(file, overrides or [])
    certificates = {
        heading: [row for name, by_steps in items for row in by_step(name, by_steps)]
        for heading, items in headings.items()
    }
    everything = [certificate for rows in certificates.values() for _, certificate in rows]
    if as_json:
        print(json.dumps([certificate.as_json() for certificate in everything], indent=2))
    else:
        print(catalogue_table(certificates))
    if plot:
        write_bytes(weight_page(str(file or "every objective"), certificates).encode(), plot)
    if not all(certificate.holds for certificate in everything):
        raise typer.Exit(2 if any(each.objective["type"] == "formula" and not each.holds for each in everything) else 1)


def _catalogue() -> "dict[str, list[Named]]":
    """Returns heading -> (name, certificates) of every objective."""
    from pipelines.cli.certificate_table import by_kind
    from rpg.certificate.catalogue import certified_objectives
    from rpg.certificate.certificate import certify_over_training

    return {
        name: [(label, certify_over_training(objective)) for label, objective in rows]
        for heading, items in certified_objectives().items()
        for name, rows in by_kind(heading, items).items()
    }


def _of_spec(file: Path, overrides: list[str]) -> "dict[str, list[Named]]":
    """Returns heading -> certificates. First come those of the spec's runs: each once, named after the first cell that
    has it. Then come the built-in objectives with the same claims as the spec's formulas.
    """
    import json

    from pipelines.report.evidence import cell_labels, with_key
    from rpg.certificate.catalogue import alike, label
    from rpg.certificate.certificate import certify_experiment, certify_over_training, turns_of
    from rpg.certificate.coverage import not_covered
    from rpg.certificate.finite import refused
    from specs.document import expand
    from specs.errors import SpecError
    from specs.loader import load_document
    from specs.schema.objective import FormulaObjective

    document = load_document(file, overrides)
    cells = expand(document)
    left = [not_covered(cell.experiment) for cell in cells]
    varied = [
        {path: value for path, value in cell.values.items() if path.startswith(("objective", *left_out))}
        for cell, left_out in zip(cells, left, strict=True)
    ]
    named: dict[tuple[str, str, str], Named] = {}
    beside: dict[str, Named] = {}
    key_of_cells, labels = cell_labels(varied)
    for cell, left_out, short in zip(cells, left, labels, strict=True):
        objective, turns = cell.experiment.objective, turns_of(cell.experiment)
        read = [left_out, cell.experiment.rollout.partial]
        key = objective.model_dump_json(), turns, json.dumps(read, sort_keys=True)
        if key in named:
            continue
        if issue := refused(objective):
            raise SpecError(document.locate(issue, cell.values))
        named[key] = (
            cell.label or with_key(key_of_cells, short) or label(objective),
            certify_experiment(cell.experiment),
        )
        if isinstance(objective, FormulaObjective):
            for name, other in alike(objective):
                beside.setdefault(name, (name, certify_over_training(other, turns)))
    built_in = {"Built-in objectives that claim the same": list(beside.values())} if beside else {}
    return {str(file): list(named.values()), **built_in}
