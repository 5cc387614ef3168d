"""Real training of a tiny model over a grid of clip bounds and weights of the divergence, recorded once.

    python benchmarks/recorded_training.py [--scratch DIRECTORY] [--seeds 4] [--cells 60] [--only LOW HIGH KL]

benchmarks/search.py --recorded looks trials up in what this writes, recorded_training.parquet: one row a step, with the
cell's values, the seed, the step's mean reward, the response tokens so far, and every sixth step the accuracy on the
256 held-out problems. The product's trainer trains recorded_training.yaml, paused at its 24th step; the base model is
made once. Runs in the file are not repeated, so that a stopped recording continues: seed by seed, the cells of a seed
in an order that is shuffled once. Each run is a fork of one process that has imported the trainer.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.processes.forking import fork
from specs.loader import load_experiment
from specs.machine.files import replacing
from specs.schema.experiment import Experiment

SPEC = Path(__file__).with_name("recorded_training.yaml")
RECORD = Path(__file__).with_name("recorded_training.parquet")
STEPS = 24
LOW = (0.05, 0.15, 0.3, 0.6)
HIGH = (0.05, 0.15, 0.4, 1.0, 3.0)
KL = (1e-3, 3e-2, 3e-1)
CELLS = tuple(itertools.product(LOW, HIGH, KL))
SCHEMA = pa.schema(
    [
        ("low", pa.float32()),
        ("high", pa.float32()),
        ("kl", pa.float32()),
        ("seed", pa.int8()),
        ("step", pa.int8()),
        ("reward", pa.float32()),
        ("tokens", pa.int32()),
        ("accuracy", pa.float32()),
    ]
)
"""kl is objective.kl_coef; a run that diverged has the row of step 0 alone."""


def spec_of(cell: tuple[float, float, float], seed: int) -> Experiment:
    """A run's spec."""
    low, high, kl = cell
    return load_experiment(
        SPEC, {"seeds": [seed], "objective.clip.low": low, "objective.clip.high": high, "objective.kl_coef": kl}
    )


def process(module: str, argument: Path, log: Path) -> int:
    """Runs `python -m MODULE ARGUMENT` as a fork to its end; its exit code."""
    with log.open("ab") as output:
        forked = fork([module, str(argument)], output, inherited=dict(os.environ), environment={})
        if forked is None:
            raise SystemExit("this machine cannot fork: it has a GPU, or RPG_FORK_STAGES forbids it")
        return forked.wait()


def make_base(scratch: Path) -> None:
    """Fills `data` and `base`, unless they are there."""
    spec = spec_of(CELLS[0], 0)
    for stage, inputs in (("data", {}), ("base", {"data": str(scratch / "data")})):
        if (scratch / f"{stage}.done").exists():
            continue
        job = scratch / f"{stage}.json"
        problems = str(scratch / "problems.json")
        out = {"out": str(scratch / stage), "problems": problems, "inputs": inputs}
        job.write_text(json.dumps({"stage": stage, "spec": spec.model_dump(mode="json"), **out}))
        if code := process("rpg.stage", job, scratch / "log.txt"):
            raise SystemExit(f"{stage} ended with {code}: {scratch / 'log.txt'}")
        (scratch / f"{stage}.done").touch()


def train(scratch: Path, cell: tuple[float, float, float], seed: int) -> list[dict[str, Any]]:
    """One run's rows; for a diverging run only its beginning."""
    run, spec = scratch / "run", spec_of(cell, seed)
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    (run / "spec.json").write_text(spec.model_dump_json())
    names = {"run_id": "recorded", "fingerprint": "recorded", "evaluation": "recorded", "until": STEPS}
    (run / "inputs.json").write_text(json.dumps({**names, "data": "../data", "base": "../base"}))
    code = process("rpg.train", run, run / "log.txt")
    key = {"low": cell[0], "high": cell[1], "kl": cell[2], "seed": seed}
    if code:
        if "not finite" not in (run / "log.txt").read_text():
            raise SystemExit(f"training ended with {code}: {run / 'log.txt'}")
        return [{**key, "step": 0, "reward": None, "tokens": 0, "accuracy": None}]
    noted = json.loads((run / "evaluated.json").read_text())["accuracies"]
    metrics: dict[int, dict[str, float]] = {}
    for segment in sorted((run / "segments/metrics").iterdir()):
        for row in pq.read_table(segment).to_pylist():
            metrics.setdefault(row["step"], {})[row["name"]] = row["value"]
    responses = spec.training.prompts_per_step * spec.training.group_size
    tokens, rows = 0.0, []
    for step in range(1, STEPS + 1):
        tokens += metrics[step]["response_length/mean"] * responses
        accuracy = noted.get(str(step), {}).get("held_out")
        reward = metrics[step]["reward/mean"]
        rows.append({**key, "step": step, "reward": reward, "tokens": round(tokens), "accuracy": accuracy})
    return rows


def main() -> None:
    """Trains the missing runs of the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/recorded-training"), help="base model and runs")
    parser.add_argument("--record", type=Path, default=RECORD, help="the file that is written")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--cells", type=int, default=len(CELLS), help="number of the shuffled cells")
    parser.add_argument("--only", type=float, nargs=3, action="append", metavar=("LOW", "HIGH", "KL"))
    arguments = parser.parse_args()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    make_base(arguments.scratch)
    rows = pq.read_table(arguments.record).to_pylist() if arguments.record.exists() else []
    cells = [tuple(cell) for cell in arguments.only or random.Random(0).sample(CELLS, len(CELLS))[: arguments.cells]]
    have = {(*(round(row[name], 6) for name in ("low", "high", "kl")), row["seed"]) for row in rows}
    for seed in range(arguments.seeds):
        for cell in cells:
            if (*cell, seed) in have:
                continue
            started = time.monotonic()
            rows += (new := train(arguments.scratch, cell, seed))
            with replacing(arguments.record) as aside:
                pq.write_table(pa.Table.from_pylist(rows, SCHEMA), aside, compression="zstd")
            seen = " ".join(f"{row['accuracy']:.3f}" for row in new if row["accuracy"] is not None) or "diverged"
            print(f"seed {seed}, {cell}: {seen}  [{time.monotonic() - started:.1f} s]", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
