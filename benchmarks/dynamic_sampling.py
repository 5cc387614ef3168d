"""Seconds of a training step with dynamic sampling: in rounds and as a stream, alternating in one run.

    python benchmarks/dynamic_sampling.py [--engines transformers vllm] [--rounds 5] [--steps 6] [--json FILE]

The model, prompts, rewards and long-tailed lengths of benchmarks/step_time.py: 8 groups of 8 responses, about geometric
lengths of mean 47, cut at 256; a response is right once in twelve times, so that about half of the groups have no
signal. A round starts both ways once for each engine, in a process of its own and with the round's seed; the first
three steps of a process are not counted. Both ways train on the same groups in the same steps, so that a ratio is taken
of the same work. The table has the median over the rounds of each process's mean, and of the rounds' ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from step_time import RESPONSES, SKIPPED_STEPS, WORKER

WAYS = ("rounds", "stream")


def measure(engine: str, way: str, *, seed: int, steps: int, home: Path) -> dict[str, float]:
    """One process: means over its counted steps."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        command = [sys.executable, str(WORKER), engine, "tailed", way, str(seed), str(steps + SKIPPED_STEPS), scratch]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode:
            raise SystemExit(f"{engine}, {way}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        found = json.loads((Path(scratch) / "result.json").read_text())
    names = ("seconds", "sampling_seconds", "mean_lengths", "dropped_tokens", "surplus_tokens")
    return {name: statistics.mean(found[name][SKIPPED_STEPS:]) for name in names}


def table(found: dict[str, dict[str, list[dict[str, float]]]]) -> Table:
    """Seconds of sampling and of a step, how many times as fast as rounds, and what was sampled and not trained on."""
    shown = Table(title="half of the groups without signal, tailed lengths", box=None, header_style="bold")
    columns = ("engine", "way", "s sampling", "times", "s a step", "times", "mean length", "thrown away", "surplus")
    for column in columns:
        shown.add_column(column, justify="left" if column in ("engine", "way") else "right")
    for engine, ways in found.items():
        for way, rounds in ways.items():
            cells = []
            for name in ("sampling_seconds", "seconds"):
                ratios = [base[name] / mine[name] for base, mine in zip(ways["rounds"], rounds, strict=True)]
                cells += [f"{median(rounds, name):.2f}", f"{statistics.median(ratios):.2f}"]
            trained = median(rounds, "mean_lengths") * RESPONSES
            wasted = [f"{median(rounds, name) / trained:.0%}" for name in ("dropped_tokens", "surplus_tokens")]
            shown.add_row(engine, way, *cells, f"{median(rounds, 'mean_lengths'):.1f}", *wasted)
    return shown


def median(rounds: list[dict[str, float]], name: str) -> float:
    return statistics.median(figures[name] for figures in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"], choices=["transformers", "vllm"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each process")
    parser.add_argument("--json", type=Path, help="write every measurement there")
    parser.add_argument("--home", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        engine: {way: [] for way in WAYS} for engine in arguments.engines
    }
    for number in range(arguments.rounds):
        for engine, ways in found.items():
            for way in WAYS:
                figures = measure(engine, way, seed=number, steps=arguments.steps, home=arguments.home)
                ways[way].append(figures)
                print(f"round {number + 1} {engine} {way}: {figures}", file=sys.stderr, flush=True)
    Console(highlight=False, width=120).print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
