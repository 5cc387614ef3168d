"""A run's spec as a file for `rpg run`, or for `rpg evaluate` if an existing model was evaluated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specs.cells import cell_source
from specs.document import Document
from specs.errors import SpecError
from specs.evaluation_document import evaluation_source
from specs.machine.files import read_json
from specs.reading.recorded import recorded_spec
from specs.reading.yaml import dump
from specs.records import EVALUATION
from specs.secrets import hide, masked


def spec_text(directory: Path) -> str:
    """Returns a spec of this run alone, as YAML: its cell of the matrix and its seed, without the fields that its
    author omitted.

    Values of variables that look secret are hidden. Paths are absolute, as they were given to the run.

    Args:
        directory: the run's. If this version cannot read the document there, the YAML has every field.
    """
    run = read_json(directory / "run.json")
    try:
        document = Document.from_json(read_json(directory / "document.json"))
        source: Mapping[str, Any] = cell_source(document.source, run["values"])
        source = {key: value for key, value in source.items() if value is not None} | {"seeds": [run["seed"]]}
    except (SpecError, KeyError):
        source = recorded_spec(directory).model_dump(mode="json")
    if run.get("kind") == EVALUATION:
        source = evaluation_source(source, run["name"])
    return hide(dump(_masked(source), comment=f"The run {run.get('run_id', directory.name)}."))


def _masked(tree: Any) -> Any:
    """Returns plain data without the secrets that earlier versions kept in an `environment`."""
    if isinstance(tree, Mapping):
        return {
            key: masked(value) if key == "environment" and _is_variables(value) else _masked(value)
            for key, value in tree.items()
        }
    return [_masked(item) for item in tree] if isinstance(tree, list) else tree


def _is_variables(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values())
