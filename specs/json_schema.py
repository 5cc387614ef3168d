"""The schema as JSON Schema, for editors that complete and check YAML."""

from typing import Any, Literal

from specs.schema.experiment import Experiment
from specs.schema.study import Study

EXTENDS = {
    "type": "string",
    "title": "Extends",
    "description": "The spec file that this one is laid over, relative to it: mappings merge, the rest replaces.",
}


def json_schema(kind: Literal["experiment", "study"]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a file of this kind; every field carries its documentation."""
    schema = (Experiment if kind == "experiment" else Study).model_json_schema()
    schema["properties"] = {"extends": EXTENDS, **schema["properties"]}
    schema["anyOf"] = [{"required": ["extends"]}, {"required": schema.pop("required")}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
