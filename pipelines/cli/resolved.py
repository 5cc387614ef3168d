"""`rpg plan --resolved`: each cell's full spec, with the origin of each value."""

from typing import Any

from pipelines.cli.output import cell_text, print_json
from specs.document import Document, expand
from specs.errors import dotted
from specs.origins import Origin, origins_of
from specs.schema.fields import item_at


def resolved_cells(document: Document) -> list[dict[str, Any]]:
    """Returns the cells in the matrix's order: their values, and path, value, origin, file and line of each field.

    The seeds of a cell share its spec, which names them all.
    """
    seeds = document.experiment.seeds
    return [
        {
            "cell": cell.values,
            "label": cell.label,
            "spec": _fields(document, cell.values, cell.experiment.model_copy(update={"seeds": seeds})),
        }
        for cell in expand(document)
        if cell.seed == seeds[0]
    ]


def print_resolved(document: Document, *, as_json: bool) -> None:
    """Prints the cells as JSON, or as a table each."""
    cells = resolved_cells(document)
    if as_json:
        print_json(cells)
        return
    for cell in cells:
        values = ", ".join(f"{path}={cell_text(value)}" for path, value in cell["cell"].items())
        print(f"{cell['label'] or values or document.experiment.name}")
        rows = [(field["path"], cell_text(field["value"]), _place(field)) for field in cell["spec"]]
        widths = [min(48, max(len(row[column]) for row in rows)) for column in (0, 1)]
        for path, value, place in rows:
            print(f"  {path:<{widths[0]}}  {value:<{widths[1]}}  {place}")
        print()


def _fields(document: Document, values: dict[str, Any], experiment: Any) -> list[dict[str, Any]]:
    plain = experiment.model_dump(mode="json")
    return [_field(origin, item_at(plain, origin.path)) for origin in origins_of(document, values, experiment)]


def _field(origin: Origin, value: Any) -> dict[str, Any]:
    return {
        **{"path": dotted(origin.path), "value": value, "origin": origin.kind},
        **({"file": origin.file, "line": origin.line} if origin.line else {}),
    }


def _place(field: dict[str, Any]) -> str:
    """Returns `spec.yaml:14`, with a note if the line is in the matrix; `--set`, `published`, `default`."""
    if "line" not in field:
        return "--set" if field["origin"] == "set" else str(field["origin"])
    return f"{field['file']}:{field['line']}" + (" (matrix)" if field["origin"] == "matrix" else "")
