"""A pass of training with and without torch.compile, over packed rows that are never twice of one length.

    python benchmarks/compiled.py [--what layers] [--rounds 6] [--recompute]

layers: each decoder layer is compiled, but for the attention of packed rows, whose Python loops over a row's sequences;
parts: norms and MLPs alone. Forward and backward of the model of benchmarks/step_time.py, one thread, float32, rows of
about 500 and 1,300 tokens, each both ways and in both orders. Prints medians of wall and CPU milliseconds and of the
ratios, the seconds of the first passes, which compile, and the largest relative difference of any tensor's gradient.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from transformers import AttentionInterface

from benchmarks.small_qwen3 import VOCABULARY, small_qwen3
from rpg.learner.packing import ATTENTION, Packing, packed_attention
from rpg.learner.policy import Policy
from rpg.learner.recomputation import recompute_activations

Row = tuple[torch.Tensor, Packing]


def make_policy(*, recompute: bool) -> Policy:
    model = small_qwen3(ends=None).train()
    model.config._attn_implementation = ATTENTION
    if recompute:
        recompute_activations(model, selective=False)
    return Policy(model, temperature=1.0)


def compile_parts(policy: Policy, what: str) -> None:
    """In place, for rows of any length."""
    AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))
    for layer in policy.model.base_model.layers:
        attention = layer.self_attn
        norms = (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)
        for module in (layer,) if what == "layers" else (layer.mlp, *norms):
            module.compile(dynamic=True)


def make_row(least: int, generator: torch.Generator) -> Row:
    """Prompts of 10 to 30 tokens with 8 responses of about geometric lengths each, until there are so many tokens."""
    families: list[tuple[int, ...]] = []
    while sum(map(sum, families)) < least:
        prompt = int(torch.randint(10, 31, (), generator=generator))
        lengths = torch.empty(8).exponential_(1 / 47, generator=generator).long().clamp(1, 256)
        families.append((prompt, *lengths.tolist()))
    tokens = sum(map(sum, families))
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=generator)
    return ids, Packing(tuple(families), torch.device("cpu"))


def seconds(policy: Policy, rows: list[Row]) -> tuple[float, float]:
    """Wall and CPU seconds of a forward and a backward of each row."""
    wall, cpu = time.perf_counter(), time.process_time()
    for ids, packing in rows:
        policy.zero_grad(set_to_none=True)
        logprobs, _ = policy(ids, torch.arange(ids.shape[1] - 1), ids[0, 1:], packing=packing)
        logprobs.sum().backward()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", choices=("layers", "parts"), default="layers")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--recompute", action="store_true", help="layers keep their input alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    eager, compiled = make_policy(recompute=arguments.recompute), make_policy(recompute=arguments.recompute)
    compile_parts(compiled, arguments.what)
    first = [make_row(least, generator) for least in (400, 900, 1400)]
    print("first passes:", ", ".join(f"{seconds(compiled, [row])[0]:.1f} s" for row in first))
    seconds(eager, first[-1:])
    weights = zip(eager.parameters(), compiled.parameters(), strict=True)
    pairs = [(one.grad, other.grad) for one, other in weights if one.grad is not None and other.grad is not None]
    print(f"gradients apart by {max(float((a - b).norm() / a.norm()) for a, b in pairs):.1e}")
    graphs, found = num_graphs(), []
    for _ in range(arguments.rounds):
        rows = [make_row(least, generator) for least in (500, 1300)]
        found.append((seconds(eager, rows), seconds(compiled, rows)))
        found.append((seconds(compiled, rows), seconds(eager, rows))[::-1])
    for place, clock in enumerate(("wall", "CPU")):
        times = [(one[place], other[place]) for one, other in found]
        ratios = [one / other for one, other in times]
        of_eager, of_compiled = (statistics.median(side) / 2 * 1e3 for side in zip(*times, strict=True))
        print(
            f"{clock}: {of_eager:.0f} ms a pass, compiled {of_compiled:.0f}; {statistics.median(ratios):.2f} times the"
            f" speed ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"{graphs} graphs after the first passes, {num_graphs()} in the end")


def num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


if __name__ == "__main__":
    main()
