"""Cost of padding, and of prompts computed for each response: a forward and backward pass over 8 x 8 responses.

padded: rows of like length; packed: sequences end to end, each with its prompt; shared: a group's prompt once.

`python benchmarks/packing.py [--threads 1]` prints CPU seconds, the least of five.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rpg.batches.batch import Microbatch, StepRollouts, microbatch
from rpg.batches.packing_plan import plan_packed, plan_padded
from rpg.learner.packing import Packing
from rpg.learner.policy import Policy, load_model
from rpg.rewards.score import Score
from specs.schema.training import Training

GROUPS, GROUP_SIZE, PROMPT, VOCABULARY = 8, 8, 20, 4096
CPU = torch.device("cpu")


def policy(directory: Path) -> Policy:
    """A Qwen3 of 4.2 million random parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return Policy(load_model(directory, Training(steps=1, prompts_per_step=1, group_size=1)), temperature=1.0)


def responses(lengths: np.ndarray, *, group_size: int) -> StepRollouts:
    """Random tokens to random prompts."""
    generator = np.random.default_rng(0)
    count, groups = int(lengths.sum()), len(lengths) // group_size
    return StepRollouts(
        prompts=tuple(generator.integers(0, VOCABULARY, PROMPT) for _ in range(groups)),
        problems=tuple(range(groups)),
        group_ids=np.repeat(np.arange(groups), group_size),
        token_ids=generator.integers(0, VOCABULARY, count),
        sampled=np.ones(count, dtype=np.bool_),
        rollout_logprobs=np.zeros(count, dtype=np.float32),
        lengths=lengths,
        num_sampled=lengths,
        held=np.arange(len(lengths)),
        finish_reasons=("stop",) * len(lengths),
        responses=("",) * len(lengths),
        scores=(Score(value=0.0, correct=False),) * len(lengths),
        policy_version=0,
    )


def passes_of(step: StepRollouts, *, max_tokens: int, packed: bool) -> list[Microbatch]:
    """Forward passes into which the trainer cuts a minibatch on one rank."""
    every = range(len(step.lengths))
    if packed:
        [rows] = plan_packed(step.prompt_lengths, step.lengths, step.group_ids, every, ranks=1, max_tokens=max_tokens)
    else:
        [rows] = plan_padded(step.sequence_lengths, every, ranks=1, max_tokens=max_tokens)
    return [microbatch(step, each, CPU, packed=packed) for each in rows]


def seconds(learner: Policy, passes: list[Microbatch]) -> float:
    """CPU seconds of a forward and backward pass over all, the least of five."""
    taken = []
    for _ in range(5):
        start = time.process_time()
        for batch in passes:
            packing = Packing(batch.packed, CPU) if batch.packed else None
            learner(batch.input_ids, batch.sources, batch.targets, packing=packing)[0].sum().backward()
        taken.append(time.process_time() - start)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    with tempfile.TemporaryDirectory() as directory:
        learner = policy(Path(directory))
    tail = np.random.default_rng(0).lognormal(3.3, 1.0, GROUPS * GROUP_SIZE).astype(np.int64).clip(2, 256)
    ways = {"padded": (False, 1), "packed": (True, 1), "shared": (True, GROUP_SIZE)}
    for name, lengths in (("long tail", tail), ("equal", np.full(GROUPS * GROUP_SIZE, 62))):
        print(f"{name}: {len(lengths)} responses of {lengths.mean():.0f} tokens on average, {lengths.max()} at most")
        for max_tokens in (16384, 4096, 1024):
            for way, (packed, group_size) in ways.items():
                step = responses(lengths, group_size=group_size)
                passes = passes_of(step, max_tokens=max_tokens, packed=packed)
                tokens = sum(batch.input_ids.numel() for batch in passes)
                taken = seconds(learner, passes)
                print(f"  {way} to {max_tokens:5}: {len(passes)} passes, {tokens:5} tokens, {taken:.2f} s", flush=True)


if __name__ == "__main__":
    main()
