"""rpg certify: what every objective's gradient is, by enumeration."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from specs.schema.objective import Objective


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command line."""
    app.command("certify")(certify)


def certify(
    file: Annotated[
        Path | None, typer.Argument(help="An experiment spec; without one, every objective there is.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a field of the spec.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The certificates as JSON.")] = False,
) -> None:
    """Hold the gradient of every objective (or of the spec's) against the exact one, by enumeration.

    Exit code 1 where an objective that claims to be exact is not.
    """
    import json

    import torch

    from pipelines.cli.certificate_table import table
    from rpg.objectives.catalogue import catalogue
    from rpg.objectives.certificate import certify as certificate_of

    torch.set_num_threads(1)  # tensors of some kilobytes: threads would wait for each other longer than they work
    headings = catalogue() if file is None else _of_spec(file, overrides or [])
    certificates = {heading: [certificate_of(item) for item in items] for heading, items in headings.items()}
    if as_json:
        print(json.dumps([item.as_json() for items in certificates.values() for item in items], indent=2))
    else:
        print(table(certificates, headings))
    if not all(item.holds for items in certificates.values() for item in items):
        raise typer.Exit(1)


def _of_spec(file: Path, overrides: list[str]) -> "dict[str, list[Objective]]":
    """The objectives of a spec's runs, each once."""
    from specs.expand import expand
    from specs.loader import load_document

    cells = expand(load_document(file, overrides))
    found = {cell.experiment.objective.model_dump_json(): cell.experiment.objective for cell in cells}
    return {str(file): list(found.values())}
