"""What padding costs: a forward and backward pass over responses of unequal length, padded to microbatches and packed.

`python benchmarks/packing.py [--threads 1]` prints CPU seconds, the least of five.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rpg.batch import StepRollouts, microbatch, plan_microbatches
from rpg.engines.packing import Packing
from rpg.engines.policy import Policy, load_model
from rpg.rewards.score import Score
from specs.schema.training import Training

RESPONSES, PROMPT, VOCABULARY = 64, 20, 4096
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


def responses(lengths: np.ndarray) -> StepRollouts:
    """Random tokens to one random prompt."""
    generator = np.random.default_rng(0)
    count = int(lengths.sum())
    return StepRollouts(
        prompts=(generator.integers(0, VOCABULARY, PROMPT),),
        problems=(0,),
        group_ids=np.zeros(len(lengths), dtype=np.int64),
        token_ids=generator.integers(0, VOCABULARY, count),
        rollout_logprobs=np.zeros(count, dtype=np.float32),
        lengths=lengths,
        finish_reasons=("stop",) * len(lengths),
        responses=("",) * len(lengths),
        scores=(Score(value=0.0, correct=False),) * len(lengths),
        policy_version=0,
    )


def measure(learner: Policy, step: StepRollouts, *, max_tokens: int, packed: bool) -> tuple[int, int, float]:
    """Passes, tokens that were computed, and CPU seconds."""
    plan = plan_microbatches(
        step.sequence_lengths, range(len(step.lengths)), ranks=1, rank=0, max_tokens=max_tokens, packed=packed
    )
    passes = [microbatch(step, rows, CPU, packed=packed) for rows in plan]
    seconds = []
    for _ in range(5):
        start = time.process_time()
        for batch in passes:
            packing = Packing.of(batch.packed, CPU) if packed else None
            learner(batch.input_ids, batch.sources, batch.targets, packing=packing)[0].sum().backward()
        seconds.append(time.process_time() - start)
    return len(passes), sum(batch.input_ids.numel() for batch in passes), min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    with tempfile.TemporaryDirectory() as directory:
        learner = policy(Path(directory))
    tail = np.random.default_rng(0).lognormal(3.3, 1.0, RESPONSES).astype(np.int64).clip(2, 256)
    for name, lengths in (("long tail", tail), ("equal", np.full(RESPONSES, 62))):
        step = responses(lengths)
        print(f"{name}: {RESPONSES} responses of {lengths.mean():.0f} tokens on average, {lengths.max()} at most")
        for max_tokens in (16384, 4096, 1024):
            for packed in (False, True):
                passes, tokens, seconds = measure(learner, step, max_tokens=max_tokens, packed=packed)
                way = "packed" if packed else "padded"
                print(f"  {way} to {max_tokens:5}: {passes} passes, {tokens:5} tokens, {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
