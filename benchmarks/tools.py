"""What tools that take time cost the sampler: tokens a second beside the same tokens with tools that take none.

    python benchmarks/tools.py [--prompts 384] [--at-once 64] [--median 0.05] [--slow 2.0] [--slow-share 0.03]

A random model writes turns that end in a call, and each call is answered after a time drawn from a lognormal
distribution with this median, a share of them after --slow seconds. Answers are on the disk before the policy
continues, as in a run. Three ways, with the same tokens:

- no wait: the tool answers at once; - turns: each response continues when its own tool has answered, as the rollouter
of tools has it; - lockstep: the next turns begin when all tools have answered.
"""

import argparse
import math
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rpg.base.tokenization import make_tokenizer
from rpg.rollouters import Problem, SeededPrompt
from rpg.rollouters.environments.tools import Tools
from rpg.rollouters.journal import Journal
from rpg.rollouters.taking_turns import Conversations
from rpg.samplers.transformers.sampler import TransformersSampler
from rpg.tools import Tool, ToolSession
from rpg.types import Pause, Rollout, Sampling, TurnRequest
from specs.schema.model import ByteTokenizer

ANSWER = "12345678"


class Sleeper(Tool):
    """Answers after a time that follows from the response and the call."""

    median: float
    slow: float
    slow_share: float
    immediate_answers: bool = False

    def describe(self) -> dict[str, Any]:
        """See Tool."""
        return {"function": {"name": self.type, "parameters": {"properties": {"text": {"type": "string"}}}}}

    def open(self) -> ToolSession:
        """See Tool."""
        return self

    def call(self, arguments: Mapping[str, Any]) -> str:
        """See ToolSession."""
        if not self.immediate_answers:
            drawn = random.Random(repr(arguments))
            slow = drawn.random() < self.slow_share
            time.sleep(self.slow if slow else drawn.lognormvariate(math.log(self.median), 0.5))
        return ANSWER

    def close(self) -> None:
        """Nothing is held."""


class Lockstep(Conversations):
    """Turns that wait for one another."""

    def _next_turns(self, pause: Pause, admit: Any) -> list[TurnRequest] | None:
        if pause != "idle":
            return []
        while self._pending:
            time.sleep(0.001)
            self._take_answers()
        return super()._next_turns(pause, admit)


def sampler_and_tokenizer(
    hidden: int, layers: int, at_once: int
) -> tuple[TransformersSampler, PreTrainedTokenizerFast]:
    """A random model over 64 printable bytes: the call's end is drawn once in 64 tokens, and no end token ever."""
    tokenizer = make_tokenizer(ByteTokenizer(), ())
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        max_position_embeddings=2048,
    )
    model = Qwen3ForCausalLM(config)
    drawable = tokenizer.encode("".join(map(chr, range(48, 112))), add_special_tokens=False)
    bias = torch.full((len(tokenizer),), -1e4)
    bias[drawable] = 0.0
    head = model.lm_head
    model.lm_head = torch.nn.Linear(hidden, len(tokenizer), bias=True)
    with torch.no_grad():
        model.lm_head.weight.copy_(0.1 * head.weight)
        model.lm_head.bias.copy_(bias)
    end, directory = int(tokenizer.eos_token_id), Path(tempfile.mkdtemp())
    tokenizer.save_pretrained(directory)
    sampler = TransformersSampler(
        model, eos_id=end, pad_id=0, max_concurrent=at_once, max_length=2048, tokenizer_dir=directory
    )
    return sampler, tokenizer


def main() -> None:
    """Prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("--prompts", 384),
        ("--at-once", 64),
        ("--turns", 4),
        ("--hidden", 256),
        ("--layers", 4),
        ("--rounds", 3),
    ):
        parser.add_argument(name, type=int, default=value)
    for name, number in (("--median", 0.05), ("--slow", 2.0), ("--slow-share", 0.03)):
        parser.add_argument(name, type=float, default=number)
    given = parser.parse_args()
    sampler, tokenizer = sampler_and_tokenizer(given.hidden, given.layers, given.at_once)
    asked = [
        SeededPrompt(Problem(str(n), "?", "", "set"), tuple(tokenizer.encode(f"{n}? ", add_special_tokens=False)), n)
        for n in range(given.prompts)
    ]
    sampling = Sampling(temperature=1.0, top_p=1.0, max_response_length=512)
    rates: dict[str, list[float]] = {"no wait": [], "turns": [], "lockstep": []}
    said: dict[str, list[Rollout]] = {}
    kept = Path(tempfile.mkdtemp())
    for number in range(given.rounds):
        for way in rates:
            journal = Journal(kept / f"{number}-{way}")  # as a run keeps what tools said
            prompts = [replace(prompt, journal=journal.of_prompt(1, prompt.seed)) for prompt in asked]
            sleeper = Sleeper(
                type="sleeper",
                median=given.median,
                slow=given.slow,
                slow_share=given.slow_share,
                immediate_answers=way == "no wait",
            )
            options = Tools(
                type="tools",
                tools=[sleeper],
                format={"call": "0{argument}a", "answer": "({answer})"},
                max_turns=given.turns,
                calls_at_once=given.prompts,
            )
            kind = Lockstep if way == "lockstep" else Conversations
            rollouts: dict[int, Rollout] = {}
            begun = time.perf_counter()
            with kind(options, prompts, tokenizer, 1, sampling, rollouts.__setitem__) as conversations:
                conversations.sample(sampler)
            seconds = time.perf_counter() - begun
            said[way] = [rollouts[index] for index in range(len(asked))]
            rates[way].append(sum(rollout.num_sampled for rollout in said[way]) / seconds)
    same = all(
        [rollout.response_ids for rollout in of_way] == [rollout.response_ids for rollout in said["no wait"]]
        for of_way in said.values()
    )
    calls = sum(bool(turn.tool) for rollout in said["turns"] for turn in rollout.turns)
    tokens = sum(rollout.num_sampled for rollout in said["turns"])
    print(f"{len(asked)} responses, {calls} calls, {tokens} sampled tokens, the same in each way: {same}")
    base = sorted(rates["no wait"])[len(rates["no wait"]) // 2]
    for way, found in rates.items():
        middle = sorted(found)[len(found) // 2]
        print(f"{way:10} {middle:7.0f} tokens a second, {middle / base:.2f} of those without waiting")


if __name__ == "__main__":
    main()
