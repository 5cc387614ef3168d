"""How long the slowest of eight engines samples beside their mean, when prompts are dealt in order and by seen lengths.

`python benchmarks/dealing.py` decodes on paper: 512 prompts x 16 responses of Qwen3-4B in bfloat16, an engine a GPU,
256 responses at once, each decoding step as long as reading the weights and the cache of what is running takes (no GPU
is needed or used). Lengths are lognormal, over problems (sigma 0.7) and within a problem (0.4), and cut at the maximum.
By seen lengths each problem counts as the mean of another group of its responses, as an epoch before has them.
"""

import numpy as np
import torch

from rpg.rollouts.dealing import SeenLengths

WEIGHT_BYTES, CACHE_BYTES, BYTES_PER_SECOND = 8.0e9, 147_456, 2.0e12
ENGINES, PROMPTS, GROUP, SLOTS, PROMPT_TOKENS = 8, 512, 16, 256, 300


def seconds(lengths: np.ndarray) -> float:
    """An engine's time for responses that begin in this order, as others end."""
    running, begun, total = np.zeros((0, 2)), 0, 0.0
    while begun < len(lengths) or len(running):
        added = lengths[begun : begun + SLOTS - len(running)]
        running = np.concatenate([running, np.stack([np.zeros(len(added)), added], axis=1)])
        begun += len(added)
        steps = max(1.0, min(32.0, float((running[:, 1] - running[:, 0]).min())))
        cached = float((running[:, 0] + PROMPT_TOKENS + steps / 2).sum())
        total += steps * (WEIGHT_BYTES + CACHE_BYTES * cached) / BYTES_PER_SECOND
        running[:, 0] += steps
        running = running[running[:, 0] < running[:, 1]]
    return total


def main() -> None:
    generator = np.random.default_rng(0)
    print(f"{'longest':>8} {'in order':>9} {'by seen lengths':>16}    slowest engine / mean")
    for longest, median in ((2048, 700), (8192, 2000), (32768, 8000)):
        ratios = []
        for _ in range(3):
            means = generator.lognormal(np.log(median), 0.7, PROMPTS)
            before, now = (
                np.minimum(means[:, None] * generator.lognormal(0, 0.4, (PROMPTS, GROUP)), longest).astype(int) + 1
                for _ in range(2)
            )
            seen = SeenLengths(PROMPTS)
            in_order = seen.deal(range(PROMPTS), ENGINES)
            seen.restore(torch.from_numpy(before.mean(axis=1).astype(np.float32)))
            times = [
                [seconds(now[share].ravel()) for share in deal]
                for deal in (in_order, seen.deal(range(PROMPTS), ENGINES))
            ]
            ratios.append([max(each) / np.mean(times[0]) for each in times])
        one, two = np.mean(ratios, axis=0)
        print(f"{longest:>8} {one:>9.2f} {two:>16.2f}")


if __name__ == "__main__":
    main()
