"""The record of runs: DuckDB over the segments and documents that runs write."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage.errors import QueryError
    from storage.ingest import compact, rebuild
    from storage.record import Record, open_record
    from storage.store import Result, Store
    from storage.verify import check

__all__ = ["QueryError", "Record", "Result", "Store", "check", "compact", "open_record", "rebuild"]
_MODULES = {
    "QueryError": "errors",
    "Record": "record",
    "Result": "store",
    "Store": "store",
    "check": "verify",
    "compact": "ingest",
    "open_record": "record",
    "rebuild": "ingest",
}
"""Name -> module that has it. Modules are imported at first use, so that a check whether a process is alive imports no
DuckDB, and a query imports no Arrow."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"storage.{_MODULES[name]}"), name)
