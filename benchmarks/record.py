"""How the record answers as it grows: homes of 10 to 5,000 runs, against one large sorted Parquet file.

    python benchmarks/record.py [--runs 10 100 1000 5000] [--steps 500] [--tokens 10_000_000 100_000_000] [--dir DIR]

The first run of a home is written by the trainer's own writer, a segment a table and step, and compacted; the others
are copies of its compacted files under other names, with other numbers for the tokens. `--tokens` is their number in
the whole home, so that responses are short where runs are many. Commands are timed as a user calls them, in a process
of their own, queries in a store that is open; each is the median of three, in brackets the CPU seconds, which say more
where other work shares the machine. Compared variants are measured in turns. 100 M tokens take 6 GB of disk.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from rpg.recording.segments import SegmentWriter
from specs.records import EvaluationRow, EvaluationSampleRow, MetricRow, RolloutRow, TokenRow
from specs.segment_names import DigestedFile, parse_segment_name
from storage import Store, compact, rebuild
from storage.columns import arrow_schema
from storage.ingest import ingest
from storage.merging.compaction import REPEATED

NUM_METRICS = 40
ROLLOUTS = 4
"""Responses of a step."""
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
FINGERPRINT = "e" * 16
QUESTIONS = {
    "clip fraction by position": "select position, avg(clipped::int) from {tokens} group by position order by position",
    "KL by prompt difficulty": "select d.difficulty, avg(t.logprob - t.ref_logprob) from {tokens} t join"
    " (select run_id, step, rollout_id, round(avg(reward) over (partition by run_id, prompt_id), 1) as difficulty"
    " from {rollouts}) d using (run_id, step, rollout_id) group by 1 order by 1",
    "entropy over steps": "select step, avg(entropy) from {tokens} group by step order by step",
    "worst ratios": "select run_id, step, rollout_id, position, ratio from {tokens}"
    " order by abs(ln(ratio)) desc limit 20",
    "length against reward": "select reward, avg(num_tokens), corr(reward, num_tokens) over () from {rollouts}"
    " group by reward, num_tokens limit 5",
}
"""Typical queries of a researcher over all samples. The same text is asked of the store and of the large file."""


def main() -> None:
    """Parses the arguments, makes the homes one after another, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[10, 100, 1000, 5000])
    parser.add_argument("--steps", type=int, default=500, help="steps of each run")
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000_000, 100_000_000], help="rows of a home")
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to make the homes; default: a temporary directory"
    )
    arguments = parser.parse_args()
    for tokens in arguments.tokens:
        columns = {}
        for runs in arguments.runs:
            with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
                columns[runs] = measure(Path(directory), runs, arguments.steps, tokens)
        title = f"{arguments.steps} steps, {tokens:,} tokens"
        table = Table("", *(f"{runs} runs" for runs in columns), title=title)
        for name in next(iter(columns.values())):
            table.add_row(name, *(column[name] for column in columns.values()))
        Console(width=50 + 34 * len(columns)).print(table)


def measure(root: Path, runs: int, steps: int, tokens: int) -> dict[str, str]:
    """The figures of one home, as text."""
    home, figures = root / "home", dict[str, str]()
    load = os.getloadavg()[0]
    first = write_run(home, steps, max(1, tokens // runs // steps // ROLLOUTS))
    segments = len(list(first.rglob("*.parquet")))
    of_duckdb = timed(lambda: bulk_load(first, root / "bulk.duckdb"))
    ours = timed(lambda: compact(home, keep_seconds=0.0))
    compact(home, keep_seconds=0.0)
    files = len(list(first.rglob("*.parquet")))
    figures["files of a run, before and after compaction"] = f"{segments} -> {files}"
    figures["ingest and compaction of the first"] = seconds_text([ours])
    figures["  speed, of DuckDB's bulk load"] = ratio_text(of_duckdb, ours)
    copies = [first, *copy_runs(first, range(1, runs))]
    experiment = home / "experiments" / "growth" / "experiment.json"
    write_json(experiment, {"runs": [run.name for run in copies], "current": [run.name for run in copies[:2]]})
    time.sleep(2.5)  # directories that have just changed are looked at again
    figures["index from nothing"] = seconds_text([timed(lambda: rebuild(home))])
    figures["ingest with nothing new"] = seconds_text([timed(lambda: ingest(home))])
    large = write_large(home, root)
    for name, arguments in {
        "rpg sql 'select 1'": ("sql", "select 1"),
        "rpg sql, one run's curve": ("sql", f"select step, reward from learning_curves where run_id = '{first.name}'"),
        "rpg runs": ("runs", "--json"),
        "rpg show": ("show", first.name),
        "rpg compare of two": ("compare", first.name, copies[1].name),
        "rpg report of one": ("report", first.name),
        "rpg db check": ("db", "check"),
    }.items():
        figures[name] = seconds_text(timed(lambda a=arguments: rpg(home, *a)) for _ in range(3))  # type: ignore[misc]
    figures |= questions(home, large)
    figures["load of the machine"] = f"{load:.1f} to {os.getloadavg()[0]:.1f}"
    return figures


def bulk_load(run: Path, database: Path) -> None:
    """A run's rows from its segments into tables of a DuckDB file."""
    with duckdb.connect(str(database)) as connection:
        for directory in (run / "segments").iterdir():
            connection.execute(f"CREATE TABLE {directory.name} AS FROM read_parquet('{directory}/*.parquet')")


def questions(home: Path, large: dict[str, str]) -> dict[str, str]:
    """Each question's time in the store, and its ratio to that of one large file."""
    answers = {}
    with Store.open(home) as store, duckdb.connect() as plain:
        for name, text in QUESTIONS.items():
            ours = text.format(tokens="tokens", rollouts="rollouts")
            theirs = text.format(**large)
            store.query(ours)
            pairs = [
                (timed(lambda q=ours: store.query(q)), timed(lambda q=theirs: plain.execute(q).fetchall()))
                for _ in range(3)
            ]  # type: ignore[misc]
            of_store, of_file = (median(times) for times in zip(*pairs, strict=True))
            answers[name] = f"{seconds_text([of_store])} = {ratio_text(of_store, of_file)}"
    return answers


def write_large(home: Path, root: Path) -> dict[str, str]:
    """All rollouts and tokens of the home as one sorted file each: relations to put into the questions."""
    relations = {}
    with duckdb.connect() as connection:
        for table in ("rollouts", "tokens"):
            path = root / f"{table}.parquet"
            files = sorted(map(str, home.glob(f"runs/*/segments/{table}/*.parquet")))  # each sorted by step
            connection.execute(f"COPY (FROM read_parquet({files})) TO '{path}' (FORMAT parquet, COMPRESSION zstd)")
            relations[table] = f"read_parquet('{path}')"
    return relations


def write_run(home: Path, steps: int, length: int) -> Path:
    """The first run, of responses of that length, as a trainer writes it."""
    run = home / "runs" / "growth-s0-00000000"
    write_documents(run, 0, steps)
    writer, draws = SegmentWriter(run, run.name, 1), np.random.default_rng(0)
    for step in range(1, steps + 1):
        write_step(writer, draws, step, length)
    for table, row in (("evaluations", EvaluationRow), ("evaluation_samples", EvaluationSampleRow)):
        path = run / "evaluate" / FINGERPRINT / "segments" / table / f"{table}.parquet"
        path.parent.mkdir(parents=True)
        rows = [
            evaluated(row, run.name, step, number)
            for step in (0, steps)
            for number in range(1 if table == "evaluations" else 200)
        ]
        pq.write_table(pa.Table.from_pylist(rows, arrow_schema(table)), path)
    return run


def write_step(writer: SegmentWriter, draws: np.random.Generator, step: int, length: int) -> None:
    """One step's rows, flushed as the trainer does."""
    names = ["reward/mean", "reward/std", "entropy", "kl/reverse", "grad_norm", "time/step"]
    names += [f"clip_fraction/{number}" for number in range(NUM_METRICS - len(names))]
    values = draws.normal(size=NUM_METRICS)
    at = BEGAN + timedelta(seconds=step)
    writer.columns(MetricRow, {"step": step, "name": names, "value": values, "recorded_at": at})
    reward = draws.integers(0, 2, ROLLOUTS).astype(float)
    writer.columns(
        RolloutRow,
        {
            "step": step,
            "rollout_id": np.arange(ROLLOUTS),
            "prompt_id": [f"p{step % 50}-{number // 2}" for number in range(ROLLOUTS)],
            "group_id": np.arange(ROLLOUTS) // 2,
            "prompt": "What is 17 + 25?",
            "response": "Let us add them up. " * (length // 5 + 1),
            "reward": reward,
            "correct": reward > 0,
            "advantage": reward - reward.mean(),
            "num_tokens": np.full(ROLLOUTS, length),
            "finish_reason": "stop",
            "policy_version": step,
            "trained_version": step,
            "reference_version": step // 16,
            "reward_error": pa.nulls(ROLLOUTS, pa.string()),
            "reward_terms": pa.nulls(ROLLOUTS, pa.string()),
            "verdicts": pa.nulls(ROLLOUTS, pa.string()),
        },
    )
    count = ROLLOUTS * length
    logprobs = -draws.exponential(0.5, (4, count)).astype(np.float32)
    writer.columns(
        TokenRow,
        {
            "step": step,
            "rollout_id": np.repeat(np.arange(ROLLOUTS, dtype=np.int32), length),
            "position": np.tile(np.arange(length, dtype=np.int32), ROLLOUTS),
            "token_id": draws.integers(0, 50_000, count).astype(np.int32),
            "logprob": logprobs[0],
            "old_logprob": logprobs[1],
            "rollout_logprob": logprobs[2],
            "ref_logprob": logprobs[3],
            "ratio": np.exp(draws.normal(0, 0.1, count)).astype(np.float32),
            "clipped": draws.random(count) < 0.02,
            "entropy": draws.exponential(0.5, count).astype(np.float32),
            "sampled": True,
            "policy_version": step - 1,
        },
    )
    writer.flush()


def evaluated(row: type, run_id: str, step: int, problem: int) -> dict[str, Any]:
    """A row of an evaluation as plain data."""
    common = {"run_id": run_id, "fingerprint": FINGERPRINT, "step": step, "dataset": "sums"}
    if row is EvaluationRow:
        measure = {"metric": "mean@8", "value": 0.5, "ci_low": 0.4, "ci_high": 0.6, "num_problems": 200}
        return common | measure | {"samples_per_problem": 1, "attempt": None}
    texts = {"prompt": "1+1=", "response": "2", "answer": "2", "extracted": "2", "finish_reason": "stop"}
    rest = {"sample": 0, "score": 1.0, "correct": True, "num_tokens": 2, "reward_error": None, "attempt": None}
    return common | texts | rest | {"problem_id": f"p{problem}"}


def copy_runs(first: Path, numbers: Iterable[int]) -> list[Path]:
    """Other runs with the rows of the first one."""
    tables = {path: pq.read_table(path) for path in first.rglob("*.parquet")}
    return [copy_run(first, number, tables) for number in numbers]


def copy_run(first: Path, number: int, tables: Mapping[Path, pa.Table]) -> Path:
    """Another run with the rows of the first one, which are given by file."""
    run = first.with_name(f"growth-s{number}-{number:08x}")
    write_documents(run, number, json.loads((first / "progress.json").read_text())["steps"])
    for path, rows in tables.items():
        renamed = other_values(rows.set_column(0, rows.schema.field(0), pa.repeat(run.name, len(rows))), number)
        directory = run / path.parent.relative_to(first)
        directory.mkdir(parents=True, exist_ok=True)
        aside, name = directory / f".{path.name}", parse_segment_name(path.name)
        with DigestedFile(aside) as file:
            options = {"compression": "zstd", "use_dictionary": REPEATED, "row_group_size": 262_144}
            pq.write_table(renamed, file, write_statistics=["run_id", "step"], **options)
        aside.rename(directory / (path.name.replace(name.digest, file.digest) if name else path.name))
    return run


def other_values(rows: pa.Table, number: int) -> pa.Table:
    """The rows with the floats of single precision, which are the tokens', scaled at random: no run repeats another."""
    draws = np.random.default_rng(number)
    for index, field in enumerate(rows.schema):
        if field.type == pa.float32():
            factors = draws.uniform(0.9, 1.1, len(rows)).astype(np.float32)
            rows = rows.set_column(index, field, pa.array(rows.column(index).to_numpy() * factors))
    return rows


def write_documents(run: Path, number: int, steps: int) -> None:
    """Writes the documents of a finished run."""
    at = (BEGAN + timedelta(hours=number)).isoformat()
    cell = {"objective.kl_coef": 10.0 ** -(number % 5)}
    identity = {"run_id": run.name, "experiment": "growth", "name": f"seed {number}", "seed": number, "values": cell}
    write_json(run / "run.json", identity | {"objective": "rpg", "question": "Does it grow?", "created_at": at})
    stages = {
        name: {"fingerprint": name, "status": "finished", "cached": False}
        for name in ("data", "base", "train", "evaluate")
    }
    state = {"status": "finished", "started_at": at, "ended_at": at, "evaluation": FINGERPRINT, "stages": stages}
    write_json(run / "state.json", state)
    write_json(run / "progress.json", {"step": steps, "steps": steps})
    write_json(run / "attempts" / "0001.json", {"attempt": 1, "resumed_from_step": 0, "started_at": at})


def write_json(path: Path, value: dict[str, Any]) -> None:
    """A document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def rpg(home: Path, *arguments: str) -> None:
    """Runs a command to its end."""
    code = "from pipelines.cli import main; main()"
    environment = os.environ | {"RPG_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"rpg {' '.join(arguments)}: {done.stderr[-400:]}", file=sys.stderr)


@dataclass(frozen=True)
class Seconds:
    """Wall and CPU seconds of a call."""

    wall: float
    cpu: float
    """CPU seconds of this process and of those that it started and waited for."""


def timed(call: Callable[[], object]) -> Seconds:
    """Wall and CPU seconds of a call."""
    begun, cpu = time.perf_counter(), cpu_seconds()
    call()
    return Seconds(time.perf_counter() - begun, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """CPU seconds so far of this process and of those that it started and waited for."""
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(times.ru_utime + times.ru_stime for times in used)


def median(times: Iterable[Seconds]) -> Seconds:
    """Median wall seconds and median CPU seconds, each by itself."""
    listed = list(times)
    return Seconds(statistics.median(t.wall for t in listed), statistics.median(t.cpu for t in listed))


def seconds_text(times: Iterable[Seconds]) -> str:
    """The median."""
    middle = median(times)
    return f"{middle.wall:.2f} s ({middle.cpu:.2f})"


def ratio_text(one: Seconds, other: Seconds) -> str:
    """One by the other; in brackets that of the CPU seconds."""
    return f"{one.wall / other.wall:.2f}x ({one.cpu / other.cpu:.2f}x)"


if __name__ == "__main__":
    main()
