"""Scorers of responses. A scorer that raises, hangs or dies costs its sample a recorded error and nothing else.

`functions` holds our rewards, one a module; `score` what a scorer says of a response; `pool` and `worker` the processes
in which scorers run, `sealing` which of them are in bubblewrap. A user's own reward is written as ours are, see
docs/extending.md.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from rpg.rewards.score import FULL_MARK, Score, Scorer, failures, prove, verdict
from rpg.rewards.sealing import in_threads, refusal
from rpg.sandbox.room import cores
from rpg.types import Problem
from specs.errors import SpecError
from specs.machine.standstill import show_work
from specs.schema.reward import Reward

__all__ = ["FULL_MARK", "Problem", "Reward", "Score", "Scorer", "failures", "open_scorer", "prove", "refusal"]


def open_scorer(reward: Reward) -> Scorer:
    """The scorer that a spec names, a context manager. Call it as often as you like, from any thread.

    Raises:
        SpecError: the reward may run what a response says, and this machine cannot seal it.
    """
    if issue := refusal(reward):
        raise SpecError(issue)
    if reward.in_process:
        return _InProcess(reward)
    if in_threads(reward):
        return _InThreads(reward)
    from rpg.rewards.pool import WorkerPool

    return WorkerPool(reward, workers=max(1, min(8, (os.cpu_count() or 1) // 2)))


class _InThreads:
    """A Scorer for a reward whose programs run in the sandbox, as many at a time as it runs."""

    def __init__(self, reward: Reward) -> None:
        reward.prepare()
        self._reward = reward
        self._threads = ThreadPoolExecutor(cores(), "scoring")

    def submit(self, problem: Problem, response: str) -> "Future[Score]":
        """See Scorer. Its result raises SandboxError where the sandbox itself failed."""
        return self._threads.submit(self._score, problem, response)

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score]:
        """See Scorer. SandboxError where the sandbox itself failed."""
        scores = [self.submit(*pair) for pair in zip(problems, responses, strict=True)]
        return [score.result() for score in scores]

    def close(self) -> None:
        """Waits for programs that run; those that do not yet get no verdict."""
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _score(self, problem: Problem, response: str) -> Score:
        score = verdict(self._reward, problem, response)
        show_work()
        return score


class _InProcess:
    """A Scorer for a reward that only compares texts."""

    def __init__(self, reward: Reward) -> None:
        reward.prepare()
        self._reward = reward

    def submit(self, problem: Problem, response: str) -> "Future[Score]":
        """See Scorer; the verdict is there at once."""
        score: Future[Score] = Future()
        score.set_result(verdict(self._reward, problem, response))
        return score

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score]:
        """See Scorer."""
        return [verdict(self._reward, *pair) for pair in zip(problems, responses, strict=True)]

    def close(self) -> None:
        """Holds nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
