"""How long the slowest of eight engines samples beside their mean: prompts dealt in order, by seen lengths, or stolen.

`python benchmarks/dealing.py` decodes on paper: 512 prompts x 16 responses of Qwen3-4B in bfloat16, an engine a GPU,
256 responses at once, each decoding step as long as reading the weights and the cache of what is running takes (no GPU
is needed or used). Lengths are lognormal, over problems (sigma 0.7) and within a problem (0.4), and cut at the maximum.
By seen lengths each problem counts as the mean of another group of its responses, as an epoch before has them. Stolen:
no engine has a share; each takes the next response that nobody has begun, at no cost, whenever it has room.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from rpg.rollouts.dealing import SeenLengths

WEIGHT_BYTES, CACHE_BYTES, BYTES_PER_SECOND = 8.0e9, 147_456, 2.0e12
ENGINES, PROMPTS, GROUP, SLOTS, PROMPT_TOKENS = 8, 512, 16, 256, 300


class Engine:
    """Decodes responses of its queue, which others may share, in the queue's order as running ones end."""

    def __init__(self, queue: deque[int]) -> None:
        self._queue = queue
        self._running = np.zeros((0, 2))
        """Tokens so far and tokens in all of each response under way. [responses, 2]"""
        self.seconds = 0.0

    @property
    def done(self) -> bool:
        """Whether nothing is under way or left to begin."""
        return not (self._queue or len(self._running))

    def advance(self) -> None:
        """Begins what there is room for, and decodes until a response ends, at most 32 tokens of each."""
        added = [self._queue.popleft() for _ in range(min(len(self._queue), SLOTS - len(self._running)))]
        self._running = np.concatenate([self._running, [[0, length] for length in added] or np.zeros((0, 2))])
        tokens, lengths = self._running.T
        steps = max(1.0, min(32.0, float((lengths - tokens).min())))
        cached = float((tokens + PROMPT_TOKENS + steps / 2).sum())
        self.seconds += steps * (WEIGHT_BYTES + CACHE_BYTES * cached) / BYTES_PER_SECOND
        self._running[:, 0] += steps
        self._running = self._running[self._running[:, 0] < self._running[:, 1]]


def seconds(queues: Sequence[deque[int]]) -> list[float]:
    """Each engine's time for the responses of its queue. The engine whose clock is behind the others' goes first."""
    engines = [Engine(queue) for queue in queues]
    while waiting := [engine for engine in engines if not engine.done]:
        min(waiting, key=lambda engine: engine.seconds).advance()
    return [engine.seconds for engine in engines]


def main() -> None:
    generator = np.random.default_rng(0)
    names = ("in order", "by seen lengths", "stolen")
    print(f"{'longest':>8}{''.join(f'{name:>17}' for name in names)}    slowest engine / mean of engines in order")
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
            deals = [in_order, seen.deal(range(PROMPTS), ENGINES)]
            ways = [[deque(now[share].ravel().tolist()) for share in deal] for deal in deals]
            ways.append([deque(now.ravel().tolist())] * ENGINES)
            times = [seconds(queues) for queues in ways]
            ratios.append([max(each) / np.mean(times[0]) for each in times])
        print(f"{longest:>8}{''.join(f'{ratio:>17.2f}' for ratio in np.mean(ratios, axis=0))}")


if __name__ == "__main__":
    main()
