"""How fast metrics are logged: by the record's writer, by MLflow into SQLite, by TensorBoard's writer.

    python benchmarks/metric_points.py [--points 1_000_000] [--metrics 40] [--dir DIR]

needs mlflow and tensorboard beside what the product needs. Give them an environment of their own that sees this one:
`python -m venv --system-site-packages`, then `pip install mlflow tensorboard`.

Each logs the same values, a step's metrics at once, and has a step written before the next begins: the record and
MLflow to the disk, TensorBoard to the operating system. The record's time has the compaction of its segments in it,
after which a query finds the rows in one file.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rpg.recording.segments import SegmentWriter
from specs.records import MetricRow
from storage import compact

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
RUN = "points-s0-00000000"
Values = np.ndarray
"""[steps, metrics]."""


def main() -> None:
    """Parses the arguments, logs with each tool, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--metrics", type=int, default=40, help="of a step")
    parser.add_argument("--dir", type=Path, default=None, help="where to write; default: a temporary directory")
    arguments = parser.parse_args()
    steps = arguments.points // arguments.metrics
    values = np.random.default_rng(0).normal(size=(steps, arguments.metrics))
    names = [f"metric/{number}" for number in range(arguments.metrics)]
    table = Table(title=f"{values.size:,} points, {steps:,} steps of {arguments.metrics}")
    for heading in ("", "wall s", "CPU s", "CPU s of the record's", "MiB"):
        table.add_column(heading, justify="right" if heading else "left")
    of_record = 0.0
    for name, log in {"record": to_record, "TensorBoard": to_tensorboard, "MLflow, SQLite": to_mlflow}.items():
        with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
            finish = log(Path(directory), names)
            begun, cpu = time.perf_counter(), cpu_seconds()
            finish(values)
            wall, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
            size = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
        of_record = of_record or cpu
        table.add_row(name, f"{wall:.1f}", f"{cpu:.1f}", f"{cpu / of_record:.2f}x", f"{size / 2**20:.1f}")
    Console().print(table)


def to_record(root: Path, names: list[str]) -> Callable[[Values], None]:
    """A segment a step, as the trainer writes it, and their compaction at the end."""
    run = root / "runs" / RUN
    write_json(run / "run.json", {"run_id": RUN, "experiment": "points", "name": "seed 0", "seed": 0})
    write_json(run / "state.json", {"status": "finished"})
    write_json(run / "attempts" / "0001.json", {"attempt": 1, "resumed_from_step": 0})
    writer = SegmentWriter(run, RUN, 1)

    def log(values: Values) -> None:
        for step, row in enumerate(values, start=1):
            columns = {"step": step, "name": names, "value": row, "recorded_at": BEGAN + timedelta(seconds=step)}
            writer.columns(MetricRow, columns)
            writer.flush()
        for _ in range(2):  # the second deletes what the first merged
            compact(root, keep_seconds=0.0)

    return log


def to_tensorboard(root: Path, names: list[str]) -> Callable[[Values], None]:
    """An event file, flushed after each step."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(root))

    def log(values: Values) -> None:
        for step, row in enumerate(values, start=1):
            for name, value in zip(names, row, strict=True):
                writer.add_scalar(name, value, step)
            writer.flush()
        writer.close()

    return log


def to_mlflow(root: Path, names: list[str]) -> Callable[[Values], None]:
    """A batch a step into MLflow's SQLite database, by its client without a server."""
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{root}/mlflow.db")
    run_id = client.create_run(client.create_experiment("points")).info.run_id

    def log(values: Values) -> None:
        for step, row in enumerate(values, start=1):
            at = int(1000 * (BEGAN + timedelta(seconds=step)).timestamp())
            metrics = [Metric(name, float(value), at, step) for name, value in zip(names, row, strict=True)]
            client.log_batch(run_id, metrics=metrics)
        client.set_terminated(run_id)

    return log


def write_json(path: Path, value: dict[str, object]) -> None:
    """A document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def cpu_seconds() -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
