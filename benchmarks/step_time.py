"""Seconds of one training step: this trainer with either sampler, TRL, and the floor, alternating in one run.

    python benchmarks/step_time.py [--lengths tailed equal] [--rounds 5] [--steps 4] [--busy 1] [--json FILE]
    python benchmarks/step_time.py --ways transformers-ahead transformers-partial --lengths tailed --steps 12
    python benchmarks/step_time.py --vocabulary 151936 --sums sampled top_k full --lengths tailed --ways transformers

The same work for all: Qwen3 architecture with 4.85 M parameters and random weights, float32, 2 threads, the same 8
prompts of 10 to 30 tokens x 8 responses, temperature 1, one update of AdamW a step, no second model. tailed: 11 of the
512 tokens end a response, so that lengths are about geometric, mean 47, cut at 256; equal: none does, 62 tokens each.

A round starts every way once, in a process of its own and with the round's seed; the first three steps of a process are
not counted; the table has the median over the rounds of each process's median. Lengths are drawn, so few steps differ
in them: "the same per token" is the ratio of milliseconds per response token. `floor`: the same sampler called directly
with the trainer's seeds, then one plain forward and backward over its samples, sequences of like length together,
without padding beyond that; no trainer. Threads wait as each way has them wait when it is started by hand: the
trainer's spin shortly and sleep, so that other runs get the cores, which costs it 5 to 10 % on an idle machine. Here
every group is trained on: the divergence gives it a gradient. A second table takes the divergence away, so that groups
whose rewards do not vary, about half, have no gradient: with them computed, and with `skip_zero_advantage`. `--sums`:
only steps with the divergence from the initial policy, a second model, summed over these tokens (`objective.kl`).
`--vocabulary`: tokens of the model; as large a share of them ends a response. `--busy 1`: one other process computes
all the while, as on a machine that is shared; the second table is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

WORKER = Path(__file__).with_name("step_time_worker.py")
WAYS = ("trl", "transformers", "vllm", "floor-transformers", "floor-vllm")
AHEAD = tuple(f"{engine}-{how}" for engine in ("transformers", "vllm") for how in ("ahead", "partial"))
"""Ways that sample ahead of training: with max_staleness 1, and with `partial` as well."""
SKIPPED_STEPS = 3
RESPONSES = 64
"""Responses of a step."""


def measure(
    way: str, lengths: str, *, seed: int, steps: int, home: Path, signal: str, vocabulary: int
) -> dict[str, float]:
    """One process: median seconds of a step, peak resident memory in GiB, mean response length."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "BENCHMARK_VOCABULARY": str(vocabulary),
    }
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        command = [sys.executable, str(WORKER), way, lengths, signal, str(seed), str(steps + SKIPPED_STEPS), scratch]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode:
            raise SystemExit(f"{way}, {lengths}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        found = json.loads((Path(scratch) / "result.json").read_text())
    seconds, mean_lengths = found["seconds"][SKIPPED_STEPS:], found["mean_lengths"][SKIPPED_STEPS:]
    return {
        "seconds": statistics.median(seconds),
        "ms_per_token": 1000 * sum(seconds) / sum(mean_lengths) / RESPONSES,
        "peak_gib": found["peak_gib"],
        "mean_length": statistics.mean(mean_lengths),
    }


@contextmanager
def computing_beside(count: int) -> Iterator[None]:
    """So many processes that never wait, while the block runs, and not beyond the end of this process."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def rounds_of(ways: tuple[str, ...], lengths: str, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """way -> one measurement a round; the ways alternate."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(arguments.rounds):
        for way in ways:
            engine, _, signal = way.partition("+")
            figures = measure(
                engine,
                lengths,
                seed=number,
                steps=arguments.steps,
                home=arguments.home,
                signal=signal or "all",
                vocabulary=arguments.vocabulary,
            )
            found[way].append(figures)
            print(f"{lengths} round {number + 1} {way}: {figures['seconds']:.2f} s", file=sys.stderr, flush=True)
    return found


def median(rounds: list[dict[str, float]], name: str) -> float:
    return statistics.median(figures[name] for figures in rounds)


def ratio(other: list[dict[str, float]] | None, name: str, form: str, mine: list[dict[str, float]]) -> str:
    return format(median(other, name) / median(mine, name), form) if other else ""


def table(title: str, found: dict[str, list[dict[str, float]]]) -> Table:
    """Seconds, how many times as fast as TRL, the share of the floor, memory."""
    shown = Table(title=title, box=None, header_style="bold")
    columns = ("way", "s a step", "mean length", "times TRL's speed", "the same per token", "share of the floor")
    for column in (*columns, "per token", "peak GiB"):
        shown.add_column(column, justify="left" if column == "way" else "right")
    for way, rounds in found.items():
        base, floor = found.get("trl"), found.get(f"floor-{way}")
        shown.add_row(
            way,
            f"{median(rounds, 'seconds'):.2f}",
            f"{median(rounds, 'mean_length'):.1f}",
            ratio(base, "seconds", ".2f", rounds),
            ratio(base, "ms_per_token", ".2f", rounds),
            ratio(floor, "seconds", ".0%", rounds),
            ratio(floor, "ms_per_token", ".0%", rounds),
            f"{median(rounds, 'peak_gib'):.2f}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", default=["tailed", "equal"], choices=["tailed", "equal"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=[*WAYS, *AHEAD])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="counted steps of each process")
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute meanwhile")
    parser.add_argument("--vocabulary", type=int, default=512, help="tokens of the model")
    parser.add_argument("--sums", nargs="+", default=[], choices=["sampled", "top_k", "full"], help="objective.kl")
    parser.add_argument("--json", type=Path, help="write every measurement there")
    parser.add_argument("--home", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    console, everything = Console(highlight=False, width=120), {}
    if arguments.sums:
        ways = tuple(
            f"{way}+{kl}" for way in arguments.ways if way in ("transformers", "vllm") for kl in arguments.sums
        )
        for lengths in arguments.lengths:
            with computing_beside(arguments.busy):
                everything[lengths] = found = rounds_of(ways, lengths, arguments)
            console.print(table(f"{lengths} lengths, vocabulary {arguments.vocabulary}", found))
        arguments.lengths = arguments.ways = []
    for lengths in arguments.lengths:
        with computing_beside(arguments.busy):
            everything[lengths] = found = rounds_of(tuple(arguments.ways), lengths, arguments)
        console.print(table(f"{lengths} lengths, {arguments.busy} other processes computing", found))
    engines = [way for way in arguments.ways if way in ("transformers", "vllm")]
    if engines and not arguments.busy:
        ways = tuple(f"{way}+{signal}" for way in engines for signal in ("half", "skipped"))
        everything["signal"] = found = rounds_of(ways, arguments.lengths[0], arguments)
        console.print(table(f"half of the groups without signal, {arguments.lengths[0]}", found))
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=2))


if __name__ == "__main__":
    main()
