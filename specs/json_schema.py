"""The schema as JSON Schema, for editors that complete and check YAML."""

from typing import Any

from specs.extensions import variants
from specs.loader import SCHEMAS, Kind
from specs.schema.base import OpenSection

EXTENDS = {
    "type": "string",
    "title": "Extends",
    "description": "The spec file that this one is laid over, relative to it: mappings merge, the rest replaces.",
}


def json_schema(kind: Kind) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a file of this kind; every field carries its documentation."""
    schema = SCHEMAS[kind].model_json_schema()
    _list_variants(schema.get("$defs", {}))
    schema["properties"] = {"extends": EXTENDS, **schema["properties"]}
    schema["anyOf"] = [{"required": ["extends"]}, {"required": schema.pop("required")}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _list_variants(definitions: dict[str, Any]) -> None:
    """Makes each open section one of its variants, ours and those of the packages installed here."""
    for section in OpenSection.__subclasses__():
        if section.__name__ not in definitions:
            continue
        forms = []
        for name, variant in variants(section).items():
            form = variant.model_json_schema()
            form["properties"][section.tag]["const"] = name
            for other, definition in form.pop("$defs", {}).items():
                definitions.setdefault(other, definition)
            forms.append(form)
        definitions[section.__name__] = {"oneOf": forms}
