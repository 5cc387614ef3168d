"""Scoring by a judge, which sees each response alone, pairs from a group, or a whole group at once."""

import itertools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from rpg.rewards.judges import prompts
from rpg.rewards.judges.budget import Budget
from rpg.rewards.judges.endpoint import Drawn, RequestRefusedError
from rpg.rewards.judges.prompts import Form, Message, Question
from rpg.rewards.judges.verdicts import KeptReplies, Reply, Verdict
from rpg.rewards.score import Group, Member, Score, Scorer
from rpg.types import Problem
from specs.machine.standstill import show_work


class Asked(Protocol):
    """Source of replies: an endpoint, or a model in its own process."""

    def ask(self, messages: Sequence[Message], drawn: Drawn) -> Reply:
        """Returns the reply to a request. Safe to call from any thread."""
        ...

    def close(self) -> None:
        """Releases its resources."""
        ...


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """Settings of the questions, without those of the judging model."""

    name: str
    """Name of the model in kept and recorded verdicts."""
    form: Form
    votes: int
    temperature: float
    max_tokens: int
    shows_answer: bool
    """Whether the judge sees the problem's right answer."""
    at_once: bool
    """Whether the reply continues `prompts.PREFIX`."""
    concurrency: int


class JudgeScorer(Scorer):
    """A Scorer that asks a judge, with a bounded number of questions at once. Kept replies are not requested again."""

    def __init__(self, settings: JudgeSettings, asked: Asked, kept: KeptReplies, budget: Budget) -> None:
        self._settings, self._asked, self._kept, self._budget = settings, asked, kept, budget
        self._threads = ThreadPoolExecutor(settings.concurrency, "judging")
        self._lock = threading.Lock()
        self._waiting: WeakKeyDictionary[Group, list[Future[Score]]] = WeakKeyDictionary()
        """Futures of the verdicts on a group that is still incomplete. The group may be dropped before it is
        complete."""
        self._under_way: dict[str, Future[Reply]] = {}
        """Pending replies, by their question."""

    def submit(self, problem: Problem, response: str, member: Member | None = None) -> "Future[Score]":
        """See Scorer. A judge that compares begins once all responses of the group have ended.

        The result raises SpecError if the budget is spent or the endpoint refuses, RewardAwayError if the endpoint was
        unavailable for too long.
        """
        if self._settings.form.kind == "each":
            return self._threads.submit(self._alone, problem, response)
        group, place = member or (Group(1), 0)
        with self._lock:
            futures = self._waiting.setdefault(group, [Future() for _ in range(group.size)])
            group.responses[place] = response
            whole = len(group.responses) == group.size
        if whole:
            self._compare(problem, [group.responses[index] for index in range(group.size)], futures)
        return futures[place]

    def close(self) -> None:
        """Cancels the pending questions, which get no verdict."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._asked.close()
        self._threads.shutdown()

    def ask(self, problem: Problem, answers: Sequence[str]) -> "Future[list[list[Verdict]]]":
        """Starts to ask one question; see `verdicts`."""
        return self._threads.submit(self.verdicts, problem, answers)

    def verdicts(self, problem: Problem, answers: Sequence[str]) -> list[list[Verdict]]:
        """Asks one question once per vote and waits. Returns the verdicts of each answer."""
        gold = problem.answer if self._settings.shows_answer else ""
        asked = prompts.question(self._settings.form, problem.question_text, answers, gold)
        votes = [self._vote(asked, vote, answers) for vote in range(self._settings.votes)]
        return [[vote[place] for vote in votes] for place in range(len(answers))]

    def _alone(self, problem: Problem, response: str) -> Score:
        (verdicts,) = self.verdicts(problem, [response])
        form = self._settings.form
        return _score(verdicts, lambda value: (value - form.low) / (form.high - form.low))

    def _compare(self, problem: Problem, answers: Sequence[str], scores: Sequence["Future[Score]"]) -> None:
        """Starts all comparisons of a group; the last one that ends computes the scores.

        A response with the same text as another gets the same verdicts, and is not compared with its copy.
        """
        texts = list(dict.fromkeys(answers))
        orders: list[tuple[int, ...]]
        if self._settings.form.kind == "pairs":
            orders = [order for pair in itertools.combinations(range(len(texts)), 2) for order in (pair, pair[::-1])]
        else:
            orders = [tuple(range(len(texts))), tuple(reversed(range(len(texts))))] if len(texts) > 1 else []
        asked = [self.ask(problem, [texts[i] for i in order]) for order in orders]
        left = itertools.count(1)

        def end(_done: object = None) -> None:
            with self._lock:
                if next(left) < len(asked):
                    return
            try:
                by_text = dict(
                    zip(texts, _compared(len(texts), orders, [each.result() for each in asked]), strict=True)
                )
                for score, answer in zip(scores, answers, strict=True):
                    score.set_result(by_text[answer])
            except BaseException as error:  # raised by a question; or it was cancelled, and no caller waits
                for score in scores:
                    score.set_exception(error)

        for each in asked:
            each.add_done_callback(end)
        if not asked:
            end()

    def _vote(self, question: Question, vote: int, answers: Sequence[str]) -> list[Verdict]:
        try:
            reply = self._reply(question, vote)
        except RequestRefusedError as error:
            return [self._verdict(question, vote, place, Reply(""), None, str(error)) for place in range(len(answers))]
        scores: Sequence[float | None]
        try:
            scores, unread = self._read(reply.text, question, len(answers)), None
        except ValueError as why:
            scores, unread = [None] * len(answers), str(why)
        return [self._verdict(question, vote, place, reply, score, unread) for place, score in enumerate(scores)]

    def _verdict(
        self, question: Question, vote: int, place: int, reply: Reply, score: float | None, error: str | None
    ) -> Verdict:
        spent = (reply.prompt_tokens, reply.tokens, reply.cost)
        return Verdict(self._settings.name, vote, reply.text, score, error, *spent, question.key, place)

    def _read(self, text: str, question: Question, count: int) -> Sequence[float]:
        form, at_once = self._settings.form, self._settings.at_once
        if form.kind == "each":
            return [prompts.number_in(form, text, question.key, at_once=at_once)]
        if form.kind == "pairs":
            better = prompts.preferred_in(text, question.key, at_once=at_once)
            return [0.5, 0.5] if better == 0 else [float(better == 1), float(better == 2)]
        order = prompts.order_in(text, question.key, count, at_once=at_once)
        return [1 - order.index(place) / (count - 1) for place in range(count)]

    def _reply(self, question: Question, vote: int) -> Reply:
        settings = self._settings
        asked = {
            "judge": settings.name,
            "prompt": prompts.VERSION,
            "messages": list(question.messages),
            "at_once": settings.at_once,
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "vote": vote,
        }
        with self._lock:  # two responses with the same text share one question
            found = self._under_way.get(name := json.dumps(asked, sort_keys=True))
            first = found is None
            found = self._under_way.setdefault(name, Future())
        if not first:
            return found.result()
        try:
            reply = self._kept.read(asked) or self._new_reply(question, vote, asked)
            found.set_result(reply)
        except BaseException as error:
            found.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._under_way[name]
        show_work()
        return reply

    def _new_reply(self, question: Question, vote: int, asked: dict[str, Any]) -> Reply:
        """Asks for a new reply, which costs money. Returns the kept one if another process got a reply to the same
        question first."""
        settings = self._settings
        self._budget.take()
        reply = self._asked.ask(question.messages, Drawn(settings.temperature, settings.max_tokens, vote))
        self._budget.pay(reply.cost)
        return self._kept.write(asked, reply)


def _compared(
    count: int, orders: Sequence[tuple[int, ...]], found: Sequence[Sequence[Sequence[Verdict]]]
) -> list[Score]:
    """Returns the scores of this number of answers, given the verdicts on each question and the order in which each
    question showed the answers."""
    verdicts: list[list[Verdict]] = [[] for _ in range(count)]
    for order, answers in zip(orders, found, strict=True):
        for index, of_one in zip(order, answers, strict=True):
            verdicts[index] += of_one
    return [_score(each, lambda value: value, alone=0.5) for each in verdicts]


def _score(verdicts: Sequence[Verdict], value_of: Callable[[float], float], alone: float | None = None) -> Score:
    """Returns the mean of the readable verdicts. `alone` is the score of a response without any verdict."""
    read = [verdict.score for verdict in verdicts if verdict.score is not None]
    said = json.dumps([asdict(verdict) for verdict in verdicts], ensure_ascii=False) if verdicts else None
    if not read:
        if not verdicts and alone is not None:
            return Score(alone, None)
        why = verdicts[0].error if verdicts else "it was not asked"
        return replace(Score.failed(f"the judge gave no verdict: {why}"), correct=None, verdicts=said)
    return Score(sum(map(value_of, read)) / len(read), None, verdicts=said)
