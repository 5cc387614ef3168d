"""The order in which problems are trained on."""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from specs.schema.data import DifficultyOrder, Order, ShuffledOrder


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

    def note(self, problems: Sequence[int], rates: Sequence[float]) -> None:
        """Hears how large a share of the responses to each of these problems was right."""

    def state(self) -> Tensor | None:
        """What `restore` needs beside the position; None: nothing."""
        return None

    def restore(self, state: Tensor | None) -> None:
        """Goes back to what `state` gave; None: to the start."""

    def _next(self) -> int:
        number, offset = divmod(self.position, self._num_problems)
        if number != self._pass:
            self._order = np.random.default_rng([self._seed, number]).permutation(self._num_problems)
            self._pass = number
        self.position += 1
        return int(self._order[offset])


class OrderByDifficulty(PromptOrder):
    """Draws problems that the policy solves now and then, and tries others in between.

    What is drawn follows from the seed, the position and the success rates so far, of which every rank knows all: so
    the ranks agree, and a run that goes on draws what it would have drawn. Of the problems of a pool that were tried
    longest ago, those noted in one batch come in the order of a shuffle.
    """

    def __init__(self, num_problems: int, options: DifficultyOrder, *, seed: int, position: int = 0) -> None:
        super().__init__(num_problems, seed=seed, position=position)
        self._options = options
        self._rates = np.full(num_problems, np.nan)
        """Success rate of each problem; NaN: it was not tried."""
        self._tried = np.zeros(num_problems)
        """Number of the batch in which each was tried last, from 1; 0: in none."""
        self._shuffled = np.random.default_rng([seed, 0]).permutation(num_problems)

    def take(self, count: int) -> list[int]:
        """Indices of the next `count` problems, of which none comes twice while there are others."""
        medium, others = self._pools()
        fresh = chain.from_iterable(repeat([*medium, *others]))
        left, drawn, taken = {"medium": iter(medium), "others": iter(others)}, set[int](), list[int]()
        for _ in range(count):
            explores = int((self.position + 1) * self._options.explore) > int(self.position * self._options.explore)
            pools = ("others", "medium") if explores else ("medium", "others")
            problem = next(_not_in(drawn, chain(*(left[pool] for pool in pools))), None)
            taken.append(next(fresh) if problem is None else problem)
            drawn.add(taken[-1])
            self.position += 1
        return taken

    def note(self, problems: Sequence[int], rates: Sequence[float]) -> None:
        """See PromptOrder. A problem that comes twice counts twice."""
        batch, memory = self._tried.max() + 1, self._options.memory
        for problem, rate in zip(problems, rates, strict=True):
            known = self._rates[problem]
            self._rates[problem] = rate if np.isnan(known) else memory * known + (1 - memory) * rate
            self._tried[problem] = batch

    def state(self) -> Tensor | None:
        """Success rates and numbers of batches. [2, problems], float64"""
        return torch.from_numpy(np.stack([self._rates, self._tried]))

    def restore(self, state: Tensor | None) -> None:
        """See PromptOrder."""
        if state is None:
            self._rates, self._tried = np.full(self._num_problems, np.nan), np.zeros(self._num_problems)
        else:
            self._rates, self._tried = state.numpy().copy()

    def _pools(self) -> tuple[list[int], list[int]]:
        """The medium problems, and the others, each with those tried longest ago first."""
        ordered = self._shuffled[np.argsort(self._tried[self._shuffled], kind="stable")]
        rates = self._rates[ordered]
        medium = (rates >= self._options.hard_below) & (rates <= self._options.easy_above)
        return ordered[medium].tolist(), ordered[~medium].tolist()


def order_of(options: Order, num_problems: int, *, seed: int) -> PromptOrder:
    """The order that a spec asks for."""
    match options:
        case ShuffledOrder():
            return PromptOrder(num_problems, seed=seed)
        case DifficultyOrder():
            return OrderByDifficulty(num_problems, options, seed=seed)
        case never:
            assert_never(never)


def _not_in(drawn: set[int], problems: Iterator[int]) -> Iterator[int]:
    return (problem for problem in problems if problem not in drawn)


def seed_of(*parts: int) -> int:
    """A seed in [0, 2^63) from whole numbers >= 0: the same for the same parts, unrelated for others."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
