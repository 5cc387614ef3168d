"""The time of a training pass by arithmetic: what limits it on a GPU, with PyTorch's operations and with fused kernels.

    python benchmarks/roofline.py

Each model's real pass is run on meta tensors, and every operation is counted; no GPU is needed, and none is measured.
"""

import argparse
import sys

from pipelines.planning.model_shape import CONFIGS, shape_of_settings
from pipelines.planning.roofline import Kernels, token_seconds
from specs.machine.cards import CARDS, H100

_QWEN3_8B = {
    **CONFIGS["Qwen/Qwen3-4B"],
    **{"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}
MODELS = {
    "0.6B": (CONFIGS["Qwen/Qwen3-0.6B"], False),
    "1.7B": (CONFIGS["Qwen/Qwen3-1.7B"], False),
    "1.7B, selective": (CONFIGS["Qwen/Qwen3-1.7B"], True),
    "4B, selective": (CONFIGS["Qwen/Qwen3-4B"], True),
    "8B, selective": (_QWEN3_8B, True),
    "30B-A3B, selective": (CONFIGS["Qwen/Qwen3-30B-A3B"], True),
}
"""Name -> settings, and whether layers recompute all but products and attention."""
WAYS = {
    "torch": Kernels(),
    "fused": Kernels(fused=True),
    "fused, head": Kernels(fused=True, head=True),
}
TOKENS, LENGTH, RESPONSES = 14592, 1824, 1568 / 1824
"""Tokens of a pass: all, of a sequence, and the share that the policy sampled."""


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default=H100.part, choices=sorted({card.part for card in CARDS if card.flops}))
    card = next(card for card in CARDS if card.part == parser.parse_args().card)
    print(f"{TOKENS} tokens in sequences of {LENGTH} on {card.name}, by arithmetic")
    print("| Qwen3 | " + " | ".join(f"{way}: ms | share of peak" for way in WAYS) + " |")
    print("|---|" + "---|---|" * len(WAYS))
    for name, (settings, recomputes) in MODELS.items():
        shape = shape_of_settings(settings)
        if shape is None or shape.traffic is None:
            print(f"{name} does not run on meta tensors", file=sys.stderr)
            return 1
        flops = shape.training_flops(TOKENS, round(TOKENS * RESPONSES), pairs=TOKENS * LENGTH / 2)
        cells = []
        for kernels in WAYS.values():
            each = token_seconds(shape, length=LENGTH, responses=RESPONSES, kernels=kernels, card=card)
            seconds = TOKENS * (each.forward + each.backward + recomputes * each.recompute_some)
            cells.append(f"{seconds * 1e3:,.0f} | {flops / seconds / card.flops:.0%}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
