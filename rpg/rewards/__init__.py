"""Scorers of responses. A scorer that raises, hangs or dies costs its sample a recorded error and nothing else."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from rpg.rewards import exact_match, math_dapo
from rpg.rewards.pool import WorkerPool
from rpg.rewards.score import FULL_MARK, Score, Scorer
from rpg.types import Problem
from specs.schema.rollout import Reward

__all__ = ["FULL_MARK", "Score", "Scorer", "open_scorer"]


def open_scorer(reward: Reward) -> Scorer:
    """The scorer that a spec names, a context manager. Call it as often as you like, from any thread."""
    if reward.type == "exact_match":
        return _InProcess(exact_match.score)
    if reward.type == "math_dapo":
        return _InProcess(math_dapo.score)
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    return WorkerPool(f"rpg.rewards.{reward.type}:score", timeout_seconds=reward.timeout_seconds, workers=workers)


class _InProcess:
    """A Scorer whose function only compares texts: it takes microseconds and cannot hang."""

    def __init__(self, function: Callable[[Problem, str], Score]) -> None:
        self._function = function

    def submit(self, problem: Problem, response: str) -> "Future[Score]":
        """See Scorer; the verdict is there at once."""
        verdict: Future[Score] = Future()
        verdict.set_result(self._function(problem, response))
        return verdict

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score]:
        """See Scorer."""
        return [self._function(problem, response) for problem, response in zip(problems, responses, strict=True)]

    def close(self) -> None:
        """Holds nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
