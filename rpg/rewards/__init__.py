"""Scorers of responses. A scorer that raises, hangs or dies costs its sample a recorded error and nothing else.

`functions` holds our rewards, one a module; `score` what a scorer says of a response; `pool` and `worker` the processes
in which scorers run, `sealing` which of them are in bubblewrap. A user's own reward is written as ours are, see
docs/extending.md.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from rpg.rewards.score import FULL_MARK, Score, Scorer, failures, prove, verdict
from rpg.rewards.sealing import in_threads, refusal
from rpg.sandbox import room
from rpg.sandbox.room import cores
from rpg.types import Problem
from specs.errors import Issue, SpecError
from specs.machine.standstill import show_work
from specs.schema.experiment import Experiment
from specs.schema.reward import Reward

__all__ = [
    "FULL_MARK",
    "Problem",
    "Reward",
    "Score",
    "Scorer",
    "failures",
    "open_scorer",
    "open_scorers",
    "prove",
    "refusal",
    "refusals",
]


def refusals(experiment: Experiment) -> list[Issue]:
    """Why this machine may not run an experiment: it cannot score with one of the rewards (see `refusal`), or run what
    its tools run. Each at its place."""
    found = ((at, refusal(reward)) for at, reward in experiment.rewards())
    refused = [replace(issue, path=(*at, *issue.path[1:])) for at, issue in found if issue]
    if (tool := experiment.rollout.rollouter.runs_programs) and (lack := room.missing()):
        message = f"the tool {tool} runs what the policy writes, in a sandbox alone: {lack.reason}"
        refused.append(Issue(message, ("rollout", "rollouter", "tools"), given=tool, hint=lack.hint))
    return refused


def open_scorers(experiment: Experiment) -> Scorer:
    """The scorer of an experiment's problems, each by the reward of its set; like `open_scorer`. Sets with the same
    reward share one.
    """
    if issues := refusals(experiment):
        raise SpecError(*issues)
    scorers: list[tuple[Reward, Scorer]] = []
    for _, reward in experiment.rewards():
        if all(reward != other for other, _ in scorers):
            scorers.append((reward, open_scorer(reward)))
    if len(scorers) == 1:
        return scorers[0][1]
    of = {
        place: next(scorer for other, scorer in scorers if other == reward)
        for place, reward in experiment.own_rewards.items()
    }
    default = next((scorer for reward, scorer in scorers if reward == experiment.reward), scorers[0][1])
    return _BySet(of, default, [scorer for _, scorer in scorers])


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


class _BySet:
    """A Scorer that hands each response to the scorer of its problem's set."""

    def __init__(self, own: Mapping[str, Scorer], default: Scorer, scorers: Sequence[Scorer]) -> None:
        """`own`: by the sets' places; `default`: of the other sets; `scorers`: all of them, each once."""
        self._own, self._default = own, default
        self._open = ExitStack()
        for scorer in scorers:
            self._open.callback(scorer.close)

    def submit(self, problem: Problem, response: str) -> "Future[Score]":
        """See Scorer."""
        return self._own.get(problem.source, self._default).submit(problem, response)

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score]:
        """See Scorer."""
        scores = [self.submit(*pair) for pair in zip(problems, responses, strict=True)]
        return [score.result() for score in scores]

    def close(self) -> None:
        """See Scorer."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
