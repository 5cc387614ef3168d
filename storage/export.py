"""Export of a run's rows as plain Parquet files, for programs that do not know this store."""

from pathlib import Path

from storage.database import connect, file_literal, quoted
from storage.snapshot import Snapshot

TABLES = (
    "metrics",
    "rollouts",
    "tokens",
    "turns",
    "evaluations",
    "evaluation_samples",
    "evaluation_scores",
    "drift_samples",
    "checkpoints",
    "events",
    "stages",
    "provenance",
    "runs",
)


def export_run(home_root: Path, run_id: str, directory: Path) -> dict[str, int]:
    """Writes `<table>.parquet` for each table with rows of the run. Returns the number of rows of each.

    Leaves out rows that a later attempt or evaluation superseded.
    """
    snapshot = Snapshot(Path(home_root).absolute())
    snapshot.provide_all()
    connection, counts = snapshot.connection, {}
    with connection:
        for table in TABLES:
            target = directory / f"{table}.parquet"
            rows = f"FROM {table} WHERE run_id = {quoted(run_id)}"
            connection.execute(f"COPY ({rows}) TO {quoted(target)} (FORMAT parquet, COMPRESSION zstd)")
            counts[table] = _num_rows(target)
            if not counts[table]:
                target.unlink()
    return {table: count for table, count in counts.items() if count}


def _num_rows(path: Path) -> int:
    with connect() as connection:
        row = connection.execute(f"SELECT count(*) FROM read_parquet({file_literal(path)})").fetchone()
    return int(row[0]) if row else 0
