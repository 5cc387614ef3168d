"""Seconds of sampling a step's groups with dynamic sampling: in rounds and as a stream, alternating in one run.

    python benchmarks/dynamic_sampling.py [--engines transformers vllm] [--steps 20] [--json FILE]

The model, prompts, rewards and long-tailed lengths of benchmarks/step_time.py: a step has 8 groups of 8 responses of
about geometric lengths, mean 47, cut at 256; a response is right once in twelve times, so that about half of the groups
have no signal. Each step is sampled and scored both ways from the same prompts, seeds and weights, now the one first
and now the other, and the script fails if the two do not keep the same tokens. The weights stay the same. The first
three steps are not counted. Ratios are of the sums over the steps; CPU seconds are those of all threads, which do not
count what other processes took of the cores. `surplus`: tokens sampled ahead for nothing, as a share of all that rounds
sample.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WAYS = ("rounds", "stream")
SKIPPED_STEPS = 3


def measure(engine: str, directory: Path, steps: int) -> dict[str, dict[str, list[float]]]:
    """way -> the measurements of each counted step."""
    import numpy as np
    import torch
    from step_time_worker import make_base, make_run

    from rpg.components import open_components
    from rpg.processes import ranks
    from rpg.recording.run_directory import RunDirectory
    from rpg.rollouts.source import RolloutSource
    from rpg.stopwatch import Stopwatch
    from specs.schema.experiment import Experiment

    ranks.join("cpu")
    torch.set_num_threads(2)
    make_base(directory / "base", "tailed")
    specs: dict[str, Experiment] = {}
    for way in WAYS:
        (directory / way).mkdir()
        run = make_run(directory / way, "tailed", way, 0, steps + SKIPPED_STEPS, engine)
        specs[way] = RunDirectory(run).spec()
    (directory / "rounds" / "base").symlink_to(directory / "base")
    found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    with open_components(
        RunDirectory(directory / "rounds" / "run"), specs["rounds"], torch.device("cpu")
    ) as components:
        sources = {way: RolloutSource(replace(components, spec=specs[way])) for way in WAYS}
        for step in range(1, steps + SKIPPED_STEPS + 1):
            before, batches = components.order.position, {}
            for way in WAYS[:: 1 if step % 2 else -1]:
                components.order.position = before
                start, cpu = time.perf_counter(), time.process_time()
                batches[way] = batch = sources[way].take(step, Stopwatch(torch.device("cpu")))
                figures: dict[str, Any] = {
                    "seconds": time.perf_counter() - start,
                    "cpu_seconds": time.process_time() - cpu,
                    "surplus": batch.figures["dynamic_sampling/surplus_tokens"],
                    "sampled": batch.num_sampled.sum() + batch.figures["dynamic_sampling/dropped_tokens"],
                }
                if step > SKIPPED_STEPS:
                    for name, value in figures.items():
                        found[way].setdefault(name, []).append(float(value))
            assert np.array_equal(batches["rounds"].token_ids, batches["stream"].token_ids), step
    ranks.leave()
    return found


def table(found: dict[str, dict[str, dict[str, list[float]]]]) -> Table:
    """Seconds of sampling a step, how many times as fast as rounds that is, and the tokens sampled for nothing."""
    shown = Table(title="half of the groups without signal, tailed lengths", box=None, header_style="bold")
    for column in ("engine", "way", "s", "times", "CPU s", "times", "surplus"):
        shown.add_column(column, justify="left" if column in ("engine", "way") else "right")
    for engine, ways in found.items():
        for way, mine in ways.items():
            cells = []
            for name in ("seconds", "cpu_seconds"):
                cells.append(f"{sum(mine[name]) / len(mine[name]):.2f}")
                cells.append(f"{sum(ways['rounds'][name]) / sum(mine[name]):.2f}")
            shown.add_row(engine, way, *cells, f"{sum(mine['surplus']) / sum(mine['sampled']):.0%}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"], choices=["transformers", "vllm"])
    parser.add_argument("--steps", type=int, default=20, help="counted steps")
    parser.add_argument("--json", type=Path, help="write every measurement there")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # measure one engine in this process, leave it here
    arguments = parser.parse_args()
    if arguments.one:
        [engine] = arguments.engines
        with tempfile.TemporaryDirectory() as scratch:
            arguments.one.write_text(json.dumps(measure(engine, Path(scratch), arguments.steps)))
        return
    found = {}
    environment = {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    for engine in arguments.engines:
        with tempfile.NamedTemporaryFile() as result:
            command = [sys.executable, __file__, "--engines", engine, "--steps", str(arguments.steps)]
            subprocess.run([*command, "--one", result.name], env=environment, check=True)
            found[engine] = json.loads(result.read())
    Console(highlight=False, width=120).print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
