"""`rpg schema`: the JSON Schema of spec files, for an editor."""

from __future__ import annotations

import enum
from typing import Annotated

import typer


class Kind(enum.StrEnum):
    """Kinds of spec files."""

    experiment = "experiment"
    study = "study"
    evaluation = "evaluation"


def schema(kind: Annotated[Kind, typer.Argument(help="experiment, study or evaluation")] = Kind.experiment) -> None:
    """Prints the JSON Schema of a spec file, with the documentation of every field."""
    import json

    from specs.json_schema import json_schema

    print(json.dumps(json_schema(kind.value), indent=2))
