"""Cost of checkpoints: steps around one, and steps with none, in turns within one run.

    python benchmarks/checkpoint.py [--pairs 5] [--shapes quickstart qwen3] [--threads 2]

Each shape trains in a process of its own and saves its whole state after every eighth step. A pair is the four steps
around such a save (its copy, the writing behind the steps after it) and the four steps after them without any. Their
difference, as a share of the ten steps of the default interval, is the cost: in wall time, and in CPU time of the
process, which other load on the machine leaves alone. `copy` is what the loop itself waits for, as a share of the same.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

EVERY, WINDOW, INTERVAL = 8, 4, 10
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def shape(name: str) -> dict[str, Any]:
    """A spec: the quickstart's step, or eight prompts with eight responses of 62 tokens and 4.8 M parameters."""
    large = name == "qwen3"
    config = {
        "hidden_size": 256 if large else 128,
        "intermediate_size": 768 if large else 384,
        "num_hidden_layers": 6 if large else 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64 if large else 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    training = {"prompts_per_step": 8, "group_size": 8} if large else {"prompts_per_step": 32, "group_size": 16}
    return {
        "name": name,
        "model": {"source": "scratch", "model_type": "qwen3", "config": config, "tokenizer": {"type": "bytes"}},
        "data": {
            "train": [{"source": "reasoning_gym", "task": "chain_sum", "config": SUMS, "size": 600}],
            "prompt": {"type": "template", "template": "{metadata.expression} ="},
            "max_prompt_length": 16,
        },
        "rollout": {"max_response_length": 62 if large else 8},
        "reward": {"type": "exact_match"},
        "objective": {"type": "rpg", "kl_coef": 0.01},
        "reference": {"source": "snapshot", "update": {"every_steps": 8}},
        "training": training | {"minibatches": 1 if large else 2, "checkpoint": {"every_steps": EVERY}},
    }


def train(directory: Path, name: str, pairs: int) -> None:
    """The worker: leaves the steps' wall and CPU seconds, and the seconds that the loop waited, in result.json."""
    from specs.machine.parent import share_cores

    share_cores()  # before anything imports torch
    from rpg import train as process
    from rpg.base.stage import make
    from rpg.data import staging
    from rpg.processes.stopping import StopAfterStep
    from rpg.trainer import Trainer
    from specs.schema.experiment import Experiment

    spec = shape(name)
    spec["training"]["steps"] = EVERY * (pairs + 1)
    experiment = Experiment.model_validate(spec)
    for stage in ("data", "base"):
        (directory / stage).mkdir()
    staging.stage(experiment.data, directory / "data")
    make(experiment, directory / "data", directory / "base")
    (directory / "spec.json").write_text(experiment.model_dump_json())
    inputs = {"run_id": name, "fingerprint": "", "data": "data", "base": "base"}
    (directory / "inputs.json").write_text(json.dumps(inputs))
    at, step = [], Trainer.step

    def timed(trainer: Trainer, stop: StopAfterStep) -> bool:
        at.append((time.perf_counter(), time.process_time()))
        return step(trainer, stop)

    Trainer.step = timed
    if code := process.main(directory):
        sys.exit(code)
    each = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in pairwise(at)]
    waited = [seconds for path in sorted((directory / "segments/metrics").iterdir()) for seconds in copies(path)]
    saved = max((directory / "checkpoints").glob("step-*"))
    size = sum(file.stat().st_size for file in saved.iterdir())
    (directory / "result.json").write_text(json.dumps({"each": each, "waited": waited, "mebibytes": size / 2**20}))


def copies(segment: Path) -> list[float]:
    """Seconds that the loop waited for a save, of the steps with one."""
    import pyarrow.parquet as pq

    rows = pq.read_table(segment).to_pylist()
    return [row["value"] for row in rows if row["name"] == "time/checkpoint" and row["step"] % EVERY == 0]


def report(name: str, result: dict[str, Any]) -> str:
    """A line of the table."""
    half = WINDOW // 2
    shares = []
    for kind in (0, 1):
        took = [seconds[kind] for seconds in result["each"]]
        # Step s is took[s - 1]; the save after step s falls into its end and into the steps after it.
        extra = [
            sum(took[save - half : save + half]) - sum(took[save + half : save + half + WINDOW])
            for save in range(EVERY, len(took) - EVERY + 2, EVERY)
        ]
        shares.append(statistics.median(extra) / (INTERVAL * statistics.median(took)))
    step = statistics.median(seconds[0] for seconds in result["each"])
    copy = statistics.median(result["waited"]) / (INTERVAL * step)
    figures = "".join(f"{100 * share:>10.1f} %" for share in (*shares, copy))
    return f"{name:12}{result['mebibytes']:>10.1f} MiB{step:>10.2f} s{figures}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--shapes", nargs="+", choices=["quickstart", "qwen3"], default=["quickstart", "qwen3"])
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.worker:
        train(chosen.worker, chosen.shapes[0], chosen.pairs)
        return
    print(f"{'shape':12}{'state':>14}{'step':>12}{'wall':>12}{'CPU':>12}{'copy':>12}", flush=True)
    for name in chosen.shapes:
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, __file__, "--worker", directory, "--shapes", name, "--pairs", str(chosen.pairs)]
            environment = {**os.environ, "OMP_NUM_THREADS": str(chosen.threads), "DS_ACCELERATOR": "cpu"}
            subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
            print(report(name, json.loads((Path(directory) / "result.json").read_text())), flush=True)


if __name__ == "__main__":
    main()
