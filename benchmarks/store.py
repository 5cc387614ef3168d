"""How fast the store takes in and answers.

    python benchmarks/store.py [--runs 2] [--steps 100] [--tokens 10000] [--dir DIR]

Writes a home of runs x steps, one segment a table and step with that many token rows, then times the first and the next
ingest, a rebuild, and queries before and after ingesting. Prints one line per figure.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import Store, rebuild
from storage.columns import arrow_schema
from storage.ingest import ingest

RESPONSE_LENGTH = 100
NUM_METRICS = 30
QUERIES = {
    "one metric": "select step, value from metrics where name = 'metric/3' order by step",
    "run summary": "from run_summary",
    "count tokens": "select count(*) from tokens",
    "mean ratio by step": "select run_id, step, avg(ratio) from tokens group by all",
    "one step's tokens": "select avg(logprob) from tokens where run_id = 'run-0' and step = 7",
    "rollouts join tokens": "select r.reward > 0, avg(t.logprob) from rollouts r join tokens t"
    " using (run_id, step, rollout_id) group by all",
}


def main() -> None:
    """Parses the arguments, writes the home, prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    parser.add_argument("--tokens", type=int, default=10_000, help="token rows of each step")
    parser.add_argument("--dir", type=Path, default=None, help="where to make the home; default: a temporary directory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        measure(Path(directory), arguments.runs, arguments.steps, arguments.tokens)


def measure(root: Path, runs: int, steps: int, tokens: int) -> None:
    """All figures of one home."""
    for run in range(runs):
        write_run(root, f"run-{run}", steps, tokens)
    size = sum(path.stat().st_size for path in root.rglob("*.parquet"))
    rows = runs * steps * tokens
    report("token rows", rows, "")
    report("segments", 3 * runs * steps, "")
    report("segments on disk", size / 2**20, "MiB")
    measure_queries(root, "from segments")
    seconds = timed(lambda: ingest(root))
    report("first ingest", seconds, "s")
    report("  of metric rows", runs * steps * NUM_METRICS / seconds, "rows/s")
    report("ingest with nothing new", timed(lambda: ingest(root)), "s")
    write_run(root, "run-0", 1, tokens, first=steps)
    report("ingest of one more step", timed(lambda: ingest(root)), "s")
    report("rebuild", timed(lambda: rebuild(root)), "s")
    report("database", (root / "experiments.duckdb").stat().st_size / 2**20, "MiB")
    measure_queries(root, "ingested")


def measure_queries(root: Path, what: str) -> None:
    """The median of five of each query, each with the snapshot that it takes."""
    for name, query in QUERIES.items():
        times = [timed(lambda query=query: Store.open(root).query(query)) for _ in range(5)]  # type: ignore[misc]
        report(f"{name} ({what})", statistics.median(times), "s")


def write_run(root: Path, run_id: str, steps: int, tokens: int, first: int = 0) -> None:
    """Segments of `steps` steps after step `first`."""
    run = root / "runs" / run_id
    run.mkdir(parents=True, exist_ok=True)
    state = {"status": "finished", "started_at": datetime.now(UTC).isoformat(), "stages": {}}
    (run / "run.json").write_text(json.dumps({"run_id": run_id, "experiment": "bench", "name": run_id, "seed": 0}))
    (run / "state.json").write_text(json.dumps(state))
    for step in range(first + 1, first + steps + 1):
        for table, columns in step_columns(step, tokens).items():
            schema = arrow_schema(table)
            length = np.size(columns["step"])
            columns |= {"run_id": [run_id] * length, "attempt": np.ones(length, np.int32)}
            path = run / "segments" / table / f"a0001-s{step:06}-{step:06}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(
                pa.table({name: columns[name] for name in schema.names}).cast(schema), path, compression="zstd"
            )


def step_columns(step: int, tokens: int) -> dict[str, dict[str, Any]]:
    """One step's rows of metrics, rollouts and tokens, by column."""
    draws = np.random.default_rng(step)
    rollouts = max(1, tokens // RESPONSE_LENGTH)
    logprobs = -draws.exponential(0.5, tokens).astype(np.float32)
    now = [datetime.now(UTC)] * NUM_METRICS
    return {
        "metrics": {
            "step": np.full(NUM_METRICS, step),
            "name": [f"metric/{index}" for index in range(NUM_METRICS)],
            "value": draws.normal(size=NUM_METRICS),
            "recorded_at": now,
        },
        "rollouts": {
            "step": np.full(rollouts, step),
            "rollout_id": np.arange(rollouts),
            "prompt_id": [f"p{index // 8}" for index in range(rollouts)],
            "group_id": np.arange(rollouts) // 8,
            "prompt": ["What is 17 + 25?"] * rollouts,
            "response": ["Let us add them up. " * 10] * rollouts,
            "reward": draws.integers(0, 2, rollouts).astype(float),
            "correct": draws.integers(0, 2, rollouts) > 0,
            "advantage": draws.normal(size=rollouts),
            "num_tokens": np.full(rollouts, RESPONSE_LENGTH),
            "finish_reason": ["stop"] * rollouts,
            "policy_version": np.full(rollouts, step),
            "trained_version": np.full(rollouts, step),
            "reference_version": np.zeros(rollouts, np.int32),
            "reward_error": [None] * rollouts,
        },
        "tokens": {
            "step": np.full(tokens, step),
            "rollout_id": np.arange(tokens) // RESPONSE_LENGTH,
            "position": np.arange(tokens) % RESPONSE_LENGTH,
            "token_id": draws.integers(0, 150_000, tokens),
            **dict.fromkeys(("logprob", "old_logprob", "rollout_logprob", "ref_logprob"), logprobs),
            "ratio": draws.normal(1, 0.1, tokens).astype(np.float32),
            "clipped": draws.random(tokens) < 0.01,
            "entropy": draws.exponential(1, tokens).astype(np.float32),
            "sampled": np.ones(tokens, np.bool_),
        },
    }


def timed(call: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def report(name: str, value: float, unit: str) -> None:
    """One line."""
    print(f"{name:<40} {value:>14,.3f} {unit}".rstrip())


if __name__ == "__main__":
    main()
