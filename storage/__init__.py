"""What happened: DuckDB over the segments and catalogues that runs leave behind."""

from storage.errors import QueryError
from storage.ingest import compact, rebuild
from storage.record import Record, open_record
from storage.store import Result, Store
from storage.verify import check

__all__ = ["QueryError", "Record", "Result", "Store", "check", "compact", "open_record", "rebuild"]
