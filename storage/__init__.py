"""What happened: DuckDB over the segments and catalogues that runs leave behind."""

import importlib
from typing import TYPE_CHECKING, Any

from storage.errors import QueryError
from storage.record import Record, open_record
from storage.store import Result, Store

if TYPE_CHECKING:
    from storage.ingest import compact, rebuild
    from storage.verify import check

__all__ = ["QueryError", "Record", "Result", "Store", "check", "compact", "open_record", "rebuild"]
_WITH_ARROW = {"check": "storage.verify", "compact": "storage.ingest", "rebuild": "storage.ingest"}
"""What reads and writes files by itself, and so needs Arrow; a query is answered sooner without it."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_ARROW:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WITH_ARROW[name]), name)
