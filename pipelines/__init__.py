"""Orchestration: plans, flows, services, studies, answers, the command line, and `load`, the entry point of the Python
API.

Imports the other three packages, Prefect and Optuna; no other package imports it. `load` is imported on first use, so
that `import pipelines` costs nothing; it is no part of what a stage reaches.
"""

import contextlib
import importlib
import locale
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.api import Job, Outcome, RunError, load

__all__ = ["Job", "Outcome", "RunError", "load"]


def _leave_working_directory() -> None:
    """Removes the working directory from the module path, here and for processes started from here, if an empty entry
    of PYTHONPATH (`PYTHONPATH=$PYTHONPATH:lib`) put it there: a file in it would shadow an installed module."""
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if len(parts) == 1 or all(parts):
        return
    named = [part for part in parts if part]
    os.environ["PYTHONPATH"] = os.pathsep.join(named)
    with contextlib.suppress(FileNotFoundError):  # the working directory was deleted
        here = os.getcwd()
        if here in sys.path and here not in map(os.path.abspath, named):
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(here)]  # the last: a script's own directory is first


_leave_working_directory()
if locale.getpreferredencoding(False).lower() != "utf-8":
    os.environ["PYTHONUTF8"] = "1"  # processes started from here write UTF-8, which this process reads back


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pipelines' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.api"), name)
