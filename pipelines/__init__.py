"""When it happens: plans, flows, services, studies, answers, the command line, and `load`, its door in Python.

Imports the other three packages, Prefect and Optuna; nothing imports it. `load` is imported when it is first used, so
that `import pipelines` costs nothing; it is no part of what a stage reaches.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.api import Job, Outcome, RunError, load

__all__ = ["Job", "Outcome", "RunError", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pipelines' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.api"), name)
