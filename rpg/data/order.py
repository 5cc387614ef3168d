"""Defines the order in which training uses the problems."""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from specs.schema.data import DifficultyOrder, Order, ShuffledOrder


class PromptOrder:
    """An order that passes through the problems repeatedly. The seed determines the shuffled order of each pass.

    `position` counts the problems drawn since the run began. It is the whole state: restoring it from a checkpoint
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
        """Returns the indices of the next `count` problems."""
        return [self._next() for _ in range(count)]

    def note(self, problems: Sequence[int], rates: Sequence[float]) -> None:
        """Receives the share of correct responses to each of these problems."""

    def state(self) -> Tensor | None:
        """Returns the state that `restore` needs in addition to the position; None if it needs nothing more."""
        return None

    def restore(self, state: Tensor | None) -> None:
        """Restores the result of `state`; None restores the initial state."""

    def _next(self) -> int:
        number, offset = divmod(self.position, self._num_problems)
        if number != self._pass:
            self._order = np.random.default_rng([self._seed, number]).permutation(self._num_problems)
            self._pass = number
        self.position += 1
        return int(self._order[offset])


class OrderByDifficulty(PromptOrder):
    """An order that prefers problems that the policy sometimes solves, and tries others in between.

    A draw depends only on the seed, the position and the success rates so far, all of which every rank knows. So the
    ranks agree, and a resumed run draws the same problems. In a pool, problems tried longest ago come first; those
    noted in the same batch are shuffled.
    """

    def __init__(self, num_problems: int, options: DifficultyOrder, *, seed: int, position: int = 0) -> None:
        super().__init__(num_problems, seed=seed, position=position)
        self._options = options
        self._rates = np.full(num_problems, np.nan)
        """Success rate of each problem; NaN if it was not tried yet."""
        self._tried = np.zeros(num_problems)
        """Number of the batch in which each problem was last tried, from 1; 0 if it was not tried."""
        self._shuffled = np.random.default_rng([seed, 0]).permutation(num_problems)

    def take(self, count: int) -> list[int]:
        """Returns the indices of the next `count` problems. No problem repeats while others are left."""
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
        """See PromptOrder. A repeated problem counts twice."""
        batch, memory = self._tried.max() + 1, self._options.memory
        for problem, rate in zip(problems, rates, strict=True):
            known = self._rates[problem]
            self._rates[problem] = rate if np.isnan(known) else memory * known + (1 - memory) * rate
            self._tried[problem] = batch

    def state(self) -> Tensor | None:
        """Returns success rates and numbers of batches. [2, problems], float64"""
        return torch.from_numpy(np.stack([self._rates, self._tried]))

    def restore(self, state: Tensor | None) -> None:
        """See PromptOrder."""
        if state is None:
            self._rates, self._tried = np.full(self._num_problems, np.nan), np.zeros(self._num_problems)
        else:
            self._rates, self._tried = state.numpy().copy()

    def _pools(self) -> tuple[list[int], list[int]]:
        """Returns the medium problems and the others, each with those tried longest ago first."""
        ordered = self._shuffled[np.argsort(self._tried[self._shuffled], kind="stable")]
        rates = self._rates[ordered]
        medium = (rates >= self._options.hard_below) & (rates <= self._options.easy_above)
        return ordered[medium].tolist(), ordered[~medium].tolist()


def order_of(options: Order, num_problems: int, *, seed: int) -> PromptOrder:
    """Returns the order that a spec asks for."""
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
    """Returns a seed in [0, 2^63) from integers >= 0. Equal integers give equal seeds, different ones give unrelated
    seeds."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
