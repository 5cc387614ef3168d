"""The order in which problems are trained on."""

import numpy as np


class PromptOrder:
    """Goes through the problems again and again, each pass in an order of its own that follows from the seed.

    `position` counts the problems taken since the run began. It is the whole state: setting it to that of a checkpoint
    gives the prompts that would have come next.
    """

    def __init__(self, num_problems: int, *, seed: int, position: int = 0) -> None:
        if num_problems < 1:
            raise ValueError("there are no problems to order")
        self.position = position
        self._num_problems = num_problems
        self._seed = seed
        self._pass = -1
        self._order = np.empty(0, dtype=np.int64)

    def take(self, count: int) -> list[int]:
        """Indices of the next `count` problems."""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        number, offset = divmod(self.position, self._num_problems)
        if number != self._pass:
            self._order = np.random.default_rng([self._seed, number]).permutation(self._num_problems)
            self._pass = number
        self.position += 1
        return int(self._order[offset])


def seed_of(*parts: int) -> int:
    """A seed in [0, 2^63) from whole numbers >= 0: the same for the same parts, unrelated for others."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
