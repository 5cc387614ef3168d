"""What an experiment is: the schema, and the loader that turns spec files into it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specs.errors import Problem, SpecError
    from specs.loader import Document, load_document, load_experiment
    from specs.schema.experiment import Experiment

_HOMES = {
    "Document": "specs.loader",
    "Experiment": "specs.schema.experiment",
    "Problem": "specs.errors",
    "SpecError": "specs.errors",
    "load_document": "specs.loader",
    "load_experiment": "specs.loader",
}

__all__ = ["Document", "Experiment", "Problem", "SpecError", "load_document", "load_experiment"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specs' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
