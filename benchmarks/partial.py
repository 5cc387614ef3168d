"""Gain and price of `rollout.partial`: simulated for engines on GPUs of their own, and trained on a CPU.

    python benchmarks/partial.py simulate [--engines 8] [--steps 60]
    python benchmarks/partial.py train [--seeds 5] [--steps 60] [--home DIR]

simulate: the trainer's own rules (`rpg/rollouts/partial.py`) for responses of drawn lengths. A decoding step of an
engine takes the time to read the weights and the cached tokens, for Qwen3-4B in bfloat16 on an H100; tokens that are
computed again cost arithmetic. `times`: steps per second, as a multiple of those with max_staleness 1 alone, if
sampling takes longest, and if the learner takes half as long as sampling did. tailed: the lengths, prompts and
group size of benchmarks/step_time.py. long: responses of up to 4,096 tokens, lognormal, mean near 1,170; 128 x 16 fill
the engines' slots once, 512 x 16 four times.

train: a policy of two layers learns to end its response with a right answer, of a mean of 30 tokens and up to 192. The
arms alternate; the reward is the mean over the last third of the steps.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from rpg.rollouts.partial import OpenGroups
from rpg.samplers.base import ADMISSION_STEPS

WEIGHTS_SECONDS = 8.0e9 / 2.4e12
"""To read 4B parameters in bfloat16, at 70 % of an H100's bandwidth."""
CACHED_TOKEN_SECONDS = 147_456 / 2.4e12
"""To read a token's keys and values: 36 layers, 8 heads, 128 numbers, bfloat16."""
PREFILL_SECONDS = 2 * 4.0e9 / 4.0e14
"""To compute a token of a prompt, at 40 % of an H100's peak."""
ARMS: dict[str, dict[str, Any]] = {
    "max_staleness 1": {"max_staleness": 1},
    "partial": {"max_staleness": 1, "partial": True},
}

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""(generator, count) -> lengths of responses."""


@dataclass(frozen=True)
class Workload:
    """A step's responses, and the slots of an engine."""

    groups: int
    size: int
    slots: int
    draw: Draw


LONG: Draw = lambda rng, count: np.minimum(np.ceil(rng.lognormal(6.75, 0.9, count)), 4096).astype(int)  # noqa: E731
WORKLOADS = {
    "tailed": Workload(8, 8, 256, lambda rng, count: np.minimum(rng.geometric(11 / 512, count), 256)),
    "long, 128 x 16": Workload(128, 16, 256, LONG),
    "long, 512 x 16": Workload(512, 16, 256, LONG),
}


class Engine:
    """Responses that one engine decodes, in slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.left = np.empty(0, dtype=int)
        """Tokens that are missing, in the order of admission."""
        self.done = np.empty(0, dtype=int)
        """Tokens so far."""
        self.groups = np.empty(0, dtype=int)

    def add(self, lengths: np.ndarray, group: int) -> None:
        self.left = np.concatenate([self.left, lengths])
        self.done = np.concatenate([self.done, np.zeros_like(lengths)])
        self.groups = np.concatenate([self.groups, np.full_like(lengths, group)])

    def decode(self, most: int) -> tuple[float, np.ndarray]:
        """Up to `most` decoding steps: their seconds, and the group of each response that has ended."""
        seconds = 0.0
        ended: list[np.ndarray] = []
        for _ in range(most):
            if not len(self.left):
                break
            active = slice(0, self.slots)
            seconds += WEIGHTS_SECONDS + CACHED_TOKEN_SECONDS * int(self.done[active].sum())
            self.left[active] -= 1
            self.done[active] += 1
            over = self.left == 0
            if over.any():
                ended.append(self.groups[over])
                self.left, self.done, self.groups = (each[~over] for each in (self.left, self.done, self.groups))
        return seconds, np.concatenate([*ended, np.empty(0, dtype=int)])

    def compute_again(self) -> float:
        """Seconds to compute the tokens so far under new weights."""
        return PREFILL_SECONDS * int(self.done.sum())


def sampled_whole(load: Workload, engines: int, steps: int, rng: np.random.Generator) -> dict[str, float]:
    """Each step's responses to their end, with max_staleness 1."""
    seconds: list[float] = []
    for _ in range(steps):
        of_engines = []
        for share in np.array_split(np.arange(load.groups), engines):
            engine = Engine(load.slots)
            for group in share:
                engine.add(load.draw(rng, load.size), int(group))
            of_engines.append(engine.decode(10**6)[0])
        seconds.append(max(of_engines))
    return {"seconds": statistics.mean(seconds)}


def sampled_in_parts(load: Workload, engines: int, steps: int, rng: np.random.Generator) -> dict[str, float]:
    """With `partial`: seconds, mean lengths of the first steps and of all, and the age of tokens."""
    of_engines = [Engine(load.slots) for _ in range(engines)]
    in_flight = load.size * min(load.groups, load.slots * engines // load.size)
    groups = OpenGroups(groups=load.groups, group_size=load.size, in_flight=in_flight, samplers=[1] * engines)
    lengths: dict[int, np.ndarray] = {}
    begun_in: dict[int, int] = {}
    seconds: list[float] = []
    means: list[float] = []
    ages: list[int] = []
    for step in range(steps):
        spent = max(engine.compute_again() for engine in of_engines)
        while not groups.has_step:
            for rank in groups.ranks_of_next():
                number = groups.begin(rank, 0, 0).number
                lengths[number], begun_in[number] = load.draw(rng, load.size), step
                of_engines[rank].add(lengths[number], number)
            decoded = [engine.decode(ADMISSION_STEPS) for engine in of_engines]
            spent += max(each for each, _ in decoded)
            for _, ended in decoded:
                groups.note(dict(zip(*(each.tolist() for each in np.unique(ended, return_counts=True)), strict=True)))
        taken = [group.number for group in groups.take()]
        seconds.append(spent)
        means.append(statistics.mean([lengths[number].mean() for number in taken]))
        ages.append(max(step - begun_in[number] for number in taken))
    settled = slice(min(10, steps // 2), None)
    return {
        "seconds": float(np.mean(seconds[settled])),
        "first_length": float(means[0]),
        "length": float(np.mean(means[settled])),
        "most_cuts": float(max(ages)),
        "unfinished": groups.unfinished / (load.groups * load.size),
    }


def simulate(arguments: argparse.Namespace) -> Table:
    shown = Table(title=f"{arguments.engines} engines", box=None, header_style="bold")
    columns = ("responses", "whole, s", "partial, s", "times", "times, learner half", "mean length")
    for column in (*columns, "in the 1st step", "later", "most steps of a response", "unfinished"):
        shown.add_column(column, justify="right")
    for name, load in WORKLOADS.items():
        whole, parts = (
            sample(load, arguments.engines, arguments.steps, np.random.default_rng(0))
            for sample in (sampled_whole, sampled_in_parts)
        )
        learner = whole["seconds"] / 2
        shown.add_row(
            name,
            f"{whole['seconds']:.2f}",
            f"{parts['seconds']:.2f}",
            f"{whole['seconds'] / parts['seconds']:.2f}",
            f"{whole['seconds'] / max(learner, parts['seconds']):.2f}",
            f"{load.draw(np.random.default_rng(1), 10**5).mean():.1f}",
            f"{parts['first_length']:.1f}",
            f"{parts['length']:.1f}",
            f"{parts['most_cuts'] + 1:.0f}",
            f"{parts['unfinished']:.0%}",
        )
    return shown


VOCABULARY, EOS, PAD, RIGHT, LONGEST = 24, 0, 23, 3, 192


def make_inputs(directory: Path) -> None:
    """A model of two layers, a tokenizer whose first RIGHT words after the end token are right answers, and data."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = ["<end>|", *(f"Answer: {int(token <= RIGHT)}\n{token}|" for token in range(1, PAD)), "<pad>|"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^|]*\|"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    base = directory / "base"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=words[PAD], eos_token=words[EOS]).save_pretrained(
        base
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    Qwen3ForCausalLM(config).save_pretrained(base)
    rng = np.random.default_rng(0)
    prompts = ["".join(words[token] for token in rng.integers(4, PAD, 6)) for _ in range(32)]
    rows = [
        {"problem_id": f"p{i}", "prompt": prompt, "answer": "1", "dataset": "train", "metadata": "{}"}
        for i, prompt in enumerate(prompts)
    ]
    (directory / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), directory / "data" / "train.parquet")


def main_of_run(run: Path) -> int:
    """Trains a run in this process, silently."""
    from rpg.train import main

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    return main(run)


def trained(directory: Path, name: str, *, seed: int, steps: int) -> dict[str, float]:
    """Trains one run of an arm: mean reward and length of its last third."""
    from specs.schema.experiment import Experiment

    run = directory / f"{name.replace(' ', '-')}-{seed}"
    run.mkdir()
    spec = {
        "name": "partial",
        "seeds": [seed],
        "model": {"source": "pretrained", "path": "base"},
        "data": {"train": [{"source": "parquet", "name": "train", "path": "train.parquet"}]},
        "reward": {"type": "math_dapo"},
        "rollout": {"max_response_length": LONGEST, **ARMS[name]},
        "objective": {"type": "rpg"},
        "training": {
            "steps": steps,
            "prompts_per_step": 8,
            "group_size": 8,
            "microbatch_tokens": 4096,
            "optimizer": {"learning_rate": 2e-3},
            "checkpoint": {"every_steps": 1000},
        },
        "record": {"tokens": "none", "rollouts": "none"},
        "resources": {"threads": 1},
    }
    (run / "spec.json").write_text(Experiment.model_validate(spec).model_dump_json(), encoding="utf-8")
    inputs = {"run_id": run.name, "fingerprint": "f" * 64, "data": "../data", "base": "../base"}
    (run / "inputs.json").write_text(json.dumps(inputs), encoding="utf-8")
    child = os.fork()  # it need not import anything
    if not child:
        os._exit(main_of_run(run))
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit(f"{run.name} ended with {code}")
    found: dict[str, list[float]] = {"reward/mean": [], "response_length/mean": [], "staleness/mean": []}
    for file in (run / "segments" / "metrics").glob("*.parquet"):
        for row in pq.read_table(file, columns=["step", "name", "value"]).to_pylist():
            if row["name"] in found and row["step"] > steps * 2 // 3:
                found[row["name"]].append(row["value"])
    return {metric: statistics.mean(values) for metric, values in found.items()}


def train(arguments: argparse.Namespace) -> Table:
    of_arms: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    import rpg.train  # noqa: F401 (the runs are forks of this process)

    with tempfile.TemporaryDirectory(dir=arguments.home) as scratch:
        make_inputs(Path(scratch))
        for seed in range(arguments.seeds):
            for name, runs in of_arms.items():
                runs.append(trained(Path(scratch), name, seed=seed, steps=arguments.steps))
                print(f"seed {seed}, {name}: {runs[-1]}", file=sys.stderr, flush=True)
    shown = Table(title=f"{arguments.seeds} seeds, {arguments.steps} steps", box=None, header_style="bold")
    for column in ("arm", "reward", "less that of max_staleness 1, 95 %", "mean length", "staleness"):
        shown.add_column(column, justify="left" if column == "arm" else "right")
    for name, runs in of_arms.items():
        pairs = zip(runs, of_arms["max_staleness 1"], strict=True)
        shown.add_row(
            name,
            f"{statistics.mean(run['reward/mean'] for run in runs):.3f}",
            "" if name == "max_staleness 1" else interval([a["reward/mean"] - b["reward/mean"] for a, b in pairs]),
            f"{statistics.mean(run['response_length/mean'] for run in runs):.1f}",
            f"{statistics.mean(run['staleness/mean'] for run in runs):.2f}",
        )
    return shown


def interval(differences: list[float]) -> str:
    from rpg.statistics.intervals import mean_interval

    found = mean_interval(np.array(differences)[:, None])
    return f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["simulate", "train"])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--home", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    shown = simulate(arguments) if arguments.part == "simulate" else train(arguments)
    Console(highlight=False, width=160).print(shown)


if __name__ == "__main__":
    main()
