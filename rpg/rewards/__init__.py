"""Scorers of responses. If a scorer raises, hangs or dies, only its sample is affected and gets a recorded error.

`functions` holds our rewards, one a module. `score` defines a scorer's verdict on a response. `pool` and `worker` run
scorers in processes; `sealing` decides which of these processes run in bubblewrap. A user's own reward is written in
the same way as ours, see docs/extending.md.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

from rpg.rewards.functions.weighted_sum import WeightedSum
from rpg.rewards.score import FULL_MARK, Member, Place, Score, Scorer, checked, failures, prove, scored_text, verdict
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
    "Place",
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
    """Returns the reasons why this machine may not run an experiment, each with its place in the spec: the machine
    cannot score with one of the rewards (see `refusal`), or lacks a requirement of the tools."""
    found = ((at, refusal(reward)) for at, reward in experiment.rewards())
    refused = [replace(issue, path=(*at, *issue.path[1:])) for at, issue in found if issue]
    rollouter = experiment.rollout.rollouter
    if issue := rollouter.lacks():
        refused.append(replace(issue, path=("rollout", "rollouter", *issue.path)))
    if (tool := rollouter.runs_programs) and (lack := room.missing()):
        message = f"the tool `{tool}` runs code that the policy writes, so it needs a sandbox: {lack.reason}"
        refused.append(Issue(message, ("rollout", "rollouter", "tools"), given=tool, hint=lack.hint))
    return refused


def open_scorers(experiment: Experiment, place: Place | None = None) -> Scorer:
    """Opens the scorer of an experiment's problems, which scores each problem by the reward of its set; see
    `open_scorer`. Sets with the same reward share one scorer.
    """
    place = place or Place()
    if issues := refusals(experiment):
        raise SpecError(*issues)
    scorers: list[tuple[Reward, Scorer]] = []
    for path, reward in experiment.rewards():
        if all(reward != other for other, _ in scorers):
            scorers.append((reward, open_scorer(reward, replace(place, path=path))))
    if len(scorers) == 1:
        return scorers[0][1]
    of = {
        place: next(scorer for other, scorer in scorers if other == reward)
        for place, reward in experiment.own_rewards.items()
    }
    default = next((scorer for reward, scorer in scorers if reward == experiment.reward), scorers[0][1])
    return _BySet(of, default, [scorer for _, scorer in scorers])


def open_scorer(reward: Reward, place: Place | None = None) -> Scorer:
    """Opens the scorer that a spec names, as a context manager. The scorer can be called any number of times, from any
    thread.

    Args:
        reward: the reward to score with.
        place: run, device and directories of the scorer. Judges and classifiers need them.
    Raises:
        SpecError: the reward may run code of a response, and this machine cannot sandbox it.
    """
    if issue := refusal(reward):
        raise SpecError(issue)
    if reward.waits:
        return _Checked(reward, reward.open(place or Place()))
    if isinstance(reward, WeightedSum) and any(part.waits or part.sealed == "always" for part in reward.parts()):
        return _OfTerms(reward, place or Place())
    if reward.in_process:
        return _InProcess(reward)
    if in_threads(reward):
        return _InThreads(reward)
    from rpg.rewards.pool import WorkerPool

    return WorkerPool(reward, workers=max(1, min(8, (os.cpu_count() or 1) // 2)))


class _BySet(Scorer):
    """A Scorer that passes each response to the scorer of its problem's set."""

    def __init__(self, own: Mapping[str, Scorer], default: Scorer, scorers: Sequence[Scorer]) -> None:
        """Takes the scorers.

        Args:
            own: place of a set -> its own scorer.
            default: scorer of the other sets.
            scorers: all scorers, each once.
        """
        self._own, self._default = own, default
        self._open = ExitStack()
        for scorer in scorers:
            self._open.callback(scorer.close)

    def submit(self, problem: Problem, response: str, member: Member | None = None) -> "Future[Score]":
        """See Scorer."""
        return self._own.get(problem.source, self._default).submit(problem, response, member)

    def close(self) -> None:
        """See Scorer."""
        self._open.close()


class _Checked(Scorer):
    """A Scorer that checks the verdicts of a reward's own scorer."""

    def __init__(self, reward: Reward, own: Scorer) -> None:
        self._reward, self._own = reward, own

    def submit(self, problem: Problem, response: str, member: Member | None = None) -> "Future[Score]":
        """See Scorer. Its result raises the errors of the reward's own scorer."""
        pending = self._own.submit(problem, scored_text(self._reward, response), member)
        return _after([pending], lambda: checked(self._reward, pending.result()))

    def close(self) -> None:
        """See Scorer."""
        self._own.close()


class _OfTerms(Scorer):
    """A Scorer of a weighted sum in which a term waits, or may run text of a response. Each term has its own scorer, so
    that a response's code cannot change another term's score."""

    def __init__(self, reward: WeightedSum, place: Place) -> None:
        self._reward = reward
        self._open = ExitStack()
        self._terms: dict[str, Scorer] = {}
        limit = {"timeout_seconds": reward.timeout_seconds}
        for index, term in enumerate(reward.terms):
            at = replace(place, path=(*place.path, "terms", index, "reward"))
            own = term.reward if term.reward.waits else term.reward.model_copy(update=limit)
            self._terms[term.label] = self._open.enter_context(open_scorer(own, at))

    def submit(self, problem: Problem, response: str, member: Member | None = None) -> "Future[Score]":
        """See Scorer. Its result raises the errors of the terms."""
        answer = scored_text(self._reward, response)
        pending = {label: scorer.submit(problem, answer, member) for label, scorer in self._terms.items()}

        def total() -> Score:
            scores = {label: each.result() for label, each in pending.items()}
            return checked(self._reward, self._reward.together(scores))

        return _after(list(pending.values()), total)

    def close(self) -> None:
        """See Scorer."""
        self._open.close()


def _after(pending: "Sequence[Future[Score]]", score: Callable[[], Score]) -> "Future[Score]":
    """Returns the future of a score that is computed once all of these futures are done."""
    formed: Future[Score] = Future()
    left = itertools.count(1)

    def end(_done: object) -> None:
        if next(left) < len(pending):  # a count is one step, even if threads end at the same time
            return
        try:
            formed.set_result(score())
        except BaseException as error:  # raised by one of them; or it was cancelled, and no caller waits
            formed.set_exception(error)

    for each in pending:
        each.add_done_callback(end)
    return formed


class _InThreads(Scorer):
    """A Scorer for a reward that runs programs in the sandbox, as many at a time as the reward allows."""

    def __init__(self, reward: Reward) -> None:
        reward.prepare()
        self._reward = reward
        self._threads = ThreadPoolExecutor(cores(), "scoring")

    def submit(self, problem: Problem, response: str, member: Member | None = None) -> "Future[Score]":  # noqa: ARG002
        """See Scorer. Its result raises SandboxError if the sandbox itself failed."""
        return self._threads.submit(self._score, problem, response)

    def close(self) -> None:
        """Waits for running programs. Those that have not started get no verdict."""
        self._threads.shutdown(cancel_futures=True)

    def _score(self, problem: Problem, response: str) -> Score:
        score = verdict(self._reward, problem, response)
        show_work()
        return score


class _InProcess(Scorer):
    """A Scorer for a reward that only compares texts."""

    def __init__(self, reward: Reward) -> None:
        reward.prepare()
        self._reward = reward

    def submit(self, problem: Problem, response: str, member: Member | None = None) -> "Future[Score]":  # noqa: ARG002
        """See Scorer. The verdict is available at once."""
        score: Future[Score] = Future()
        score.set_result(verdict(self._reward, problem, response))
        return score

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score]:
        """See Scorer. Avoids futures, which would take as long as a score."""
        return [verdict(self._reward, *pair) for pair in zip(problems, responses, strict=True)]

    def close(self) -> None:
        """Does nothing, because this scorer holds no resources."""
