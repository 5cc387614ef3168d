"""Experiments as data: the schema, and the loader that reads spec files with it. The other packages also use `machine`.

Names are loaded when first used, so that `import specs` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from specs.machine.proxies import reach_this_machine_directly

if TYPE_CHECKING:
    from specs.document import Document
    from specs.errors import Issue, SpecError
    from specs.loader import load_document, load_experiment, load_study, load_study_document, parse_objective
    from specs.schema.experiment import Experiment
    from specs.schema.study import Study
    from specs.study_document import StudyDocument

_HOMES = {
    "Document": "specs.document",
    "Experiment": "specs.schema.experiment",
    "Issue": "specs.errors",
    "SpecError": "specs.errors",
    "Study": "specs.schema.study",
    "StudyDocument": "specs.study_document",
    "load_document": "specs.loader",
    "load_experiment": "specs.loader",
    "load_study": "specs.loader",
    "load_study_document": "specs.loader",
    "parse_objective": "specs.loader",
}

__all__ = [
    "Document",
    "Experiment",
    "Issue",
    "SpecError",
    "Study",
    "StudyDocument",
    "load_document",
    "load_experiment",
    "load_study",
    "load_study_document",
    "parse_objective",
]

reach_this_machine_directly()  # in every process, and before any client is opened


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specs' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
