"""Response tokens per second of the samplers and of transformers' own, on the same prompts, in one run.

    python benchmarks/sampler.py [--lengths tailed equal] [--ways ours generate generate_batch vllm] [--rounds 5]

8 prompts of 10 to 30 tokens x 8 responses; Qwen3 architecture, 4.85 M parameters, float32, random weights. tailed: any
of 11 of the 512 tokens ends a response, so that lengths are about geometric, mean 47, cut at 256; equal: none does, 62
tokens each. Rounds alternate between the ways after one round each that is not counted; medians. `forward` is one pass
without a cache over the sequences of `ours`, those of like length together: about the least that the arithmetic takes.
CPU seconds count what the process itself used, so that other load on the machine matters less.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from small_qwen3 import PAD, small_qwen3
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from rpg.samplers.base import Sampler
from rpg.samplers.transformers.sampler import TransformersSampler
from rpg.types import Sampling

GROUP_SIZE = 8
ENDS = {"tailed": list(range(11)), "equal": []}
LIMITS = {"tailed": 256, "equal": 62}
Way = Callable[[int], list[list[int]]]
"""Seed of the round -> responses, cut after their end token."""


@dataclass(frozen=True)
class Work:
    """Work that every way is given."""

    model: PreTrainedModel
    prompts: list[list[int]]
    ends: list[int]
    limit: int

    @property
    def repeated(self) -> list[list[int]]:
        return [prompt for prompt in self.prompts for _ in range(GROUP_SIZE)]

    def cut(self, response: list[int]) -> list[int]:
        """Up to and with its end token."""
        return response[: next((i + 1 for i, token in enumerate(response) if token in self.ends), len(response))]


def make_work(lengths: str) -> Work:
    model = small_qwen3(ends=None).eval()
    rng = random.Random(0)
    prompts = [[rng.randrange(20, PAD) for _ in range(rng.randrange(10, 31))] for _ in range(8)]
    return Work(model, prompts, ENDS[lengths], LIMITS[lengths])


def sampled_by(sampler: Sampler, work: Work) -> Way:
    sampling = Sampling(temperature=1.0, top_p=1.0, max_response_length=work.limit)

    def sample(seed: int) -> list[list[int]]:
        seeds = range(1000 * seed, 1000 * seed + len(work.prompts))
        groups = sampler.generate(work.prompts, group_size=GROUP_SIZE, sampling=sampling, seeds=seeds)
        return [list(rollout.response_ids) for group in groups for rollout in group.rollouts]

    return sample


def ours(work: Work) -> Way:
    return sampled_by(TransformersSampler(work.model, eos_id=work.ends, pad_id=PAD, max_concurrent=256), work)


def vllm(work: Work) -> Way:
    from rpg.samplers.vllm.engine import EngineSettings
    from rpg.samplers.vllm.sampler import VllmSampler

    directory = Path(tempfile.mkdtemp())
    work.model.save_pretrained(directory)
    settings = EngineSettings(directory, tuple(work.ends), device_type="cpu", max_length=300, max_concurrent=256)
    return sampled_by(VllmSampler(settings), work)


def generation_config(work: Work) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=work.limit, eos_token_id=work.ends or None, pad_token_id=PAD
    )


def generate(work: Work) -> Way:
    """transformers' generate, every response a row of one batch."""
    longest = max(map(len, work.prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in work.repeated])
    mask = (torch.arange(longest) >= torch.tensor([[longest - len(prompt)] for prompt in work.repeated])).long()

    def sample(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        output = work.model.generate(  # type: ignore[operator]  # its mixin is not typed
            input_ids=ids, attention_mask=mask, generation_config=generation_config(work)
        )
        return [work.cut(row) for row in output[:, longest:].tolist()]

    return sample


def generate_batch(work: Work) -> Way:
    """transformers' continuous batching."""

    def sample(seed: int) -> list[list[int]]:
        outputs = work.model.generate_batch(  # type: ignore[operator]  # its mixin is not typed
            work.repeated,
            generation_config=generation_config(work),
            # Room for every request at once; by default it takes most of the machine's memory.
            continuous_batching_config=ContinuousBatchingConfig(seed=seed, num_blocks=192, max_batch_tokens=2048),
        )
        return [work.cut(output.generated_tokens) for output in outputs.values()]

    return sample


WAYS = {"ours": ours, "generate": generate, "generate_batch": generate_batch, "vllm": vllm}


def forward(work: Work, responses: list[list[int]]) -> list[list[int]]:
    """One pass over each sequence, sequences of like length together. Returns the responses."""
    pairs = zip(work.repeated, responses, strict=True)
    rows = sorted((torch.tensor(prompt + response) for prompt, response in pairs), key=len)
    with torch.no_grad():
        for first in range(0, len(rows), 8):
            work.model(input_ids=torch.nn.utils.rnn.pad_sequence(rows[first : first + 8], batch_first=True))
    return responses


@dataclass(frozen=True)
class Round:
    tokens: int
    wall_seconds: float
    cpu_seconds: float


def timed(run: Callable[[], list[list[int]]]) -> tuple[list[list[int]], Round]:
    wall, cpu = time.perf_counter(), time.process_time()
    responses = run()
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    return responses, Round(sum(map(len, responses)), *seconds)


def measure(lengths: str, names: list[str], rounds: int) -> dict[str, list[Round]]:
    work = make_work(lengths)
    ways = {name: WAYS[name](work) for name in names}
    measured: dict[str, list[Round]] = {name: [] for name in [*names, "forward"]}
    for number in range(rounds + 1):
        for name, way in ways.items():
            responses, one = timed(partial(way, number))
            measured[name].append(one)
            if name == "ours":
                measured["forward"].append(timed(partial(forward, work, responses))[1])
    return {name: those[1:] for name, those in measured.items()}


def show(lengths: str, measured: dict[str, list[Round]]) -> None:
    rounds = len(measured["ours"])
    print(f"\n{lengths}: {torch.get_num_threads()} threads, medians of {rounds} rounds")
    print(f"{'':15}{'tokens':>8}{'tokens/s':>10}{'of ours':>9}{'tokens/CPU s':>14}{'of ours':>9}")
    wall = {name: statistics.median(one.tokens / one.wall_seconds for one in those) for name, those in measured.items()}
    cpu = {name: statistics.median(one.tokens / one.cpu_seconds for one in those) for name, those in measured.items()}
    for name, those in measured.items():
        tokens = statistics.median(one.tokens for one in those)
        speeds = f"{wall[name]:10.0f}{wall[name] / wall['ours']:9.2f}{cpu[name]:14.0f}{cpu[name] / cpu['ours']:9.2f}"
        print(f"{name:15}{tokens:8.0f}{speeds}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", choices=list(ENDS), default=list(ENDS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    for lengths in arguments.lengths:
        names = ["ours", *(name for name in arguments.ways if name != "ours")]
        show(lengths, measure(lengths, names, arguments.rounds))


if __name__ == "__main__":
    main()
