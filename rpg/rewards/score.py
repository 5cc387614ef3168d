"""The score of a response, and the scorers of responses."""

import math
import re
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self
from urllib.error import HTTPError

from pydantic import TypeAdapter

from rpg.messages import message
from rpg.sandbox import SandboxError
from rpg.types import Problem
from specs.errors import Issue
from specs.schema.reward import Reward

FULL_MARK = 1.0
"""Value from which a response counts as correct, under every scorer that is not graded."""
LONGEST_VERDICT = 16 << 20
"""Longest verdict, in bytes. A verdict includes the extracted answer, which is at most a whole response. Also the
largest number of characters of a text."""
_LONGEST_REASON = 1 << 14
"""Largest number of characters of an error that are kept."""
_LONGEST_NAME, _MOST_TERMS = 200, 1000
"""Largest number of characters of a term's name, and of terms in a score."""
_MOST_REASONS = 3
"""Largest number of kinds of failure that a sentence names."""
_FINITE = sys.float_info.max
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500


@message
@dataclass(frozen=True, slots=True)
class Score:
    """Verdict on one response."""

    value: float
    """The reward. If the scorer failed, the least value that the reward declares, else 0. In training the value of a
    failed response is at most the least value of its group, penalties included."""
    correct: bool | None
    """Whether the value reaches the full mark. For a weighted sum, whether the first term's value does. None if the
    reward is graded."""
    extracted: str | None = None
    """Answer that the scorer read from the response; None if it found none."""
    error: str | None = None
    """Why the scorer failed: the exception's message, with file and line of the reward. None if it did not fail."""
    away: bool = False
    """Whether the scorer failed because a service did not answer. That is not the reward's fault, and the response is
    retryable."""
    penalty: float = 0.0
    """Number, at most 0, that is added to the value for properties that the scorer does not see, such as the length."""
    turns: float = 0.0
    """Sum of the rewards that the environment gave for the response's turns. It is added to the value."""
    terms: dict[str, float] = field(default_factory=dict)
    """Name of each term of a weighted sum -> its value, not weighted."""
    weights: dict[str, float] = field(default_factory=dict)
    """Name of each term -> its weight in the sum."""
    verdicts: str | None = None
    """Verdicts of judges on the response, JSON: a list of the fields of `rpg.rewards.judges.verdicts.Verdict`. None if
    no judge was asked."""

    @property
    def reward(self) -> float:
        """Returns the number that training uses."""
        return self.value + self.penalty + self.turns

    @property
    def earned(self) -> float:
        """Returns the reward without penalties."""
        return self.value + self.turns

    @classmethod
    def of(cls, value: float, extracted: str | None) -> Self:
        """Returns the verdict of a scorer that did not fail. Unpaired surrogates in the answer become `?`."""
        if isinstance(extracted, str) and not extracted.isascii():
            extracted = extracted.encode(errors="replace").decode()
        return cls(value=value, correct=bool(value >= FULL_MARK), extracted=extracted)

    @classmethod
    def failed(cls, error: str, *, away: bool = False) -> Self:
        """Returns the verdict for a scorer that raised, hung or died."""
        return cls(value=0.0, correct=False, error=error, away=away)


def scores_vary(scores: Sequence[Score], *, by_term: bool) -> bool:
    """Returns whether a group's scores differ, without penalties on length. Only such a group gives a gradient.

    Args:
        scores: the scores of the responses to one prompt.
        by_term: whether each term of a sum counts by itself, as with `advantage.rewards: normalized_each`. Sums may be
            equal although terms differ. A response that could not be scored then counts like the worst of its group.
    """
    if not by_term:
        return _differ([score.earned for score in failures_at_worst(scores)])
    known = [score for score in scores if score.error is None]
    terms = [score.terms or {"": score.value} for score in known]
    counted = {label for score in known for label, weight in (score.weights or {"": 1.0}).items() if weight}
    values = [[each.get(label, 0.0) for each in terms] for label in counted]
    return any(map(_differ, (*values, [score.turns for score in known])))


def _differ(values: Sequence[float]) -> bool:
    """Returns whether numbers differ by more than rounding errors."""
    return bool(values) and not math.isclose(max(values), min(values), rel_tol=1e-9)


@dataclass(frozen=True, slots=True)
class _Said:
    """The fields of a verdict that are accepted from a process that may have run text of a response."""

    value: float
    extracted: str | None = None
    error: str | None = None


_SCORE, _SAID = TypeAdapter(Score), TypeAdapter(_Said)


def received(line: bytes | bytearray, *, ran_text: bool) -> Score:
    """Returns the verdict that a worker sent as JSON. Raises ValueError if the line is not a verdict.

    Args:
        ran_text: whether the worker may have run text of a response, which may have written the line. Then only value,
            extracted answer and error are read.
    """
    if not ran_text:
        return _SCORE.validate_json(line, strict=True)
    said = _SAID.validate_json(line, strict=True)
    return Score.failed(said.error) if said.error is not None else Score.of(said.value, said.extracted)


def verdict(reward: Reward, problem: Problem, response: str) -> Score:
    """Returns the reward's score of a response, or a failed score with the reason. Raises SandboxError if the sandbox
    failed instead of the reward."""
    return checked(reward, _verdict(reward, problem, response))


def checked(reward: Reward, score: Score) -> Score:
    """Returns the score after a check against the reward's declarations. Every verdict goes through this function.

    An invalid score becomes a failure with the reason. Under a graded reward `correct` is None, and a response on which
    the reward fails gets the least value that the reward declares, or 0.
    """
    try:
        score = _valid(reward, score)
    except ValueError as fault:
        score = Score.failed(f"the reward returned an invalid score: {fault}")
    if not reward.grades():
        return score
    least = reward.worst_value()
    value = least if score.error is not None and least is not None else score.value
    return replace(score, value=value, correct=None)


def failures_at_worst(scores: Sequence[Score]) -> list[Score]:
    """Returns the scores of a group, with failures lowered to at most the least of the other scores.

    Otherwise a failure would be the best of its group if all values are negative, or all other responses are too long.

    Example:
        >>> failed = Score.failed("no verdict")
        >>> [score.value for score in failures_at_worst([Score.of(-1.0, "3"), Score.of(2.0, "4"), failed])]
        [-1.0, 2.0, -1.0]
    """
    least = min((score.value + score.penalty for score in scores if score.error is None), default=0.0)
    return [
        score if score.error is None else replace(score, value=min(score.value, least - score.penalty))
        for score in scores
    ]


def _valid(reward: Reward, score: Score) -> Score:
    """Returns the score with plain numbers. Raises ValueError for values that cannot be recorded or trained on."""
    if not isinstance(score, Score):
        raise ValueError(f"{score!r:.200} is not a Score")
    largest, least = reward.largest_value(), reward.worst_value()
    value, correct = number("value", score.value, largest), _plain(score.correct)
    if score.error is None and least is not None and value < least and not math.isclose(value, least, abs_tol=1e-9):
        raise ValueError(f"value is {value!r}; allowed: at least {least:g}, the lowest value that the reward declares")
    if not (correct is None or isinstance(correct, bool)) or not isinstance(score.away, bool):
        given = f"correct is {correct!r:.100} and away is {score.away!r:.100}"
        raise ValueError(f"{given}; allowed: True or False, and for correct also None")
    text("extracted", score.extracted)
    error = text("error", score.error)
    if error is not None and len(error) > _LONGEST_REASON:
        score = replace(score, error=error[:_LONGEST_REASON])
    if score.penalty or score.turns:
        number("turns", score.turns, largest_added(reward))
        if number("penalty", score.penalty, largest_added(reward)) > 0:
            raise ValueError(f"penalty is {score.penalty!r}; allowed: a number of at most 0")
    if score.terms or score.weights:
        _check_terms(reward, score, largest)
    if score.verdicts is not None:
        from rpg.rewards.judges.verdicts import check_verdicts

        check_verdicts(text("verdicts", score.verdicts))
    if type(score.value) is float and correct is score.correct:
        return score
    return replace(score, value=value, correct=correct)


def largest_added(reward: Reward) -> float:
    """Returns the largest absolute value that the environment or a penalty adds to a score."""
    return max(reward.largest_value(), Reward.largest)


def _check_terms(reward: Reward, score: Score, largest: float) -> None:
    """Raises ValueError unless a score's terms are numbers with weights, with names that can be recorded."""
    terms, weights = score.terms, score.weights
    if not isinstance(terms, dict) or not isinstance(weights, dict) or terms.keys() != weights.keys():
        raise ValueError("terms and weights must be mappings from the same names to numbers")
    if len(terms) > _MOST_TERMS:
        raise ValueError(f"it has {len(terms)} terms; allowed: at most {_MOST_TERMS}")
    for name, value in terms.items():
        if text("a term's name", name) is None or len(name) > _LONGEST_NAME:
            raise ValueError(f"a term's name is {name!r:.200}; allowed: a text of at most {_LONGEST_NAME} characters")
        if not (type(value) is float and -largest <= value <= largest):  # a term may have a larger bound than the sum
            number(f"the term {name}", value, max(part.largest_value() for part in (reward, *reward.parts())))
        number("a term's weight", weights[name], _FINITE)


def number(name: str, value: object, largest: float) -> float:
    """Returns the value as a finite number from -largest to largest. Raises ValueError for any other value."""
    if type(value) is float and -largest <= value <= largest:  # the usual case
        return value
    plain = _plain(value)
    try:
        if isinstance(plain, Real) and -largest <= (found := float(plain)) <= largest:
            return found
    except OverflowError:
        pass
    allowed = "a finite number" if largest == _FINITE else f"a number from {-largest:g} to {largest:g}"
    raise ValueError(f"{name} is {plain!r:.200}; allowed: {allowed}")


def text(name: str, value: object) -> str | None:
    """Returns the value if it is None or a text that can be recorded. Raises ValueError otherwise."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.200}; allowed: a text or None")
    if len(value) > LONGEST_VERDICT:
        raise ValueError(f"{name} has {len(value)} characters; allowed: at most {LONGEST_VERDICT}")
    if not value.isascii():
        value.encode()  # raises UnicodeEncodeError, a ValueError, for an unpaired surrogate
    return value


def _plain(value: object) -> object:
    """Returns the Python number of a NumPy scalar or of a tensor with one element; any other value unchanged."""
    if value is None or type(value) in (float, bool, int):
        return value
    try:
        return value.item()  # type: ignore[attr-defined]
    except (AttributeError, ValueError, RuntimeError, TypeError):
        return value


def scored_text(reward: Reward, response: str) -> str:
    """Returns the part of a response that the reward scores; see `Reward.strip_thinking`.

    Example:
        >>> after_thought = Reward.model_validate({"type": "exact_match", "strip_thinking": True})
        >>> scored_text(after_thought, "<think>6 * 7</think> 42"), scored_text(after_thought, "<think>6 * 7 is 42")
        ('42', '')
    """
    if not reward.strip_thinking:
        return response
    answer = response.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer.lstrip()


def _verdict(reward: Reward, problem: Problem, response: str) -> Score:
    try:
        score: Score = reward.score(problem, scored_text(reward, response))
    except SandboxError:
        raise
    except Exception as error:
        place = _place(reward, error)
        return Score.failed(f"{type(error).__name__}: {error}"[:500] + place, away=_is_away(error))
    return score


def _place(reward: Reward, error: Exception) -> str:
    """Returns ` (FILE:LINE)` for the line of the reward that raised, or that called the code that raised."""
    written = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in type(reward).__mro__[:-1]}
    written |= {*reward.written_in()}
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first frame is in this file
    own = [frame for frame in frames if frame.filename in written] or frames
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _is_away(error: BaseException) -> bool:
    """Returns whether an exception, or one in its chain of causes, reports that a service did not answer."""
    return any(
        isinstance(each, (ConnectionError, TimeoutError, socket.gaierror))
        or (isinstance(each, HTTPError) and (each.code == _TOO_MANY_REQUESTS or each.code >= _SERVER_ERROR))
        for each in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the exception and, each once, those in its chain of causes and contexts."""
    met: list[BaseException] = []
    waiting: list[object] = [error]
    while waiting:
        each = waiting.pop()
        if isinstance(each, BaseException) and each not in met:
            met.append(each)
            yield each
            waiting += [each.__cause__, each.__context__, getattr(each, "reason", None)]


def without_answer(problem: Problem, reward: str) -> Issue | None:
    """Returns an issue if the problem's answer is empty although the reward compares with it; else None."""
    if problem.answer.strip():
        return None
    return Issue(
        f"`reward.type: {reward}` compares a response with the problem's answer, but this problem has no answer",
        given=problem.prompt[:80],
        hint="name the column of the answers, fix the row, or use a reward that needs no answer",
    )


_MISSING = re.compile(r"[+-]?(?i:nan|inf|infinity)|<NA>|NaT|None|null|N/A")
_LIST_OF_TEXTS = re.compile(r"""\[\s*(["']).*\1\s*\]""", re.DOTALL)
_WHOLE_FLOAT = re.compile(r"[+-]?\d+\.0+")


def odd(answer: str) -> str:
    """Returns a warning about a doubtful gold answer, or an empty text.

    Example:
        >>> odd("6 * 12 = 72 #### 72"), odd("['72']"), odd("72")
        ('hold their solution before `####`', 'are lists of texts', '')
    """
    if _MISSING.fullmatch(answer.strip()):
        return "stand for a missing value"
    if "####" in answer:
        return "hold their solution before `####`"
    return "are lists of texts" if _LIST_OF_TEXTS.fullmatch(answer.strip()) else ""


def odd_as_text(answer: str) -> str:
    """Returns a warning about a doubtful gold answer that is compared as text, or an empty text.

    Example:
        >>> odd_as_text("72.0"), odd_as_text("72")
        ('are whole numbers written as floats, which a response without `.0` does not equal', '')
    """
    if doubt := odd(answer):
        return doubt
    if _WHOLE_FLOAT.fullmatch(answer := answer.strip()):
        return "are whole numbers written as floats, which a response without `.0` does not equal"
    if answer in ("True", "False"):
        return "are booleans, which are compared as the texts `True` and `False`"
    return ""


class RewardFailedError(RuntimeError):
    """Error raised if the reward itself fails on most responses."""


class RewardAwayError(RuntimeError):
    """Error raised if the service that the reward needs does not answer for most responses."""


def failures(scores: Sequence[Score]) -> str:
    """Returns how many responses could not be scored, with the most frequent reasons; empty if all were scored.

    Example:
        >>> failures([Score.of(1.0, None), Score.failed("no verdict after 10 s")])
        '1 of 2 responses: no verdict after 10 s'
    """
    reasons = Counter(score.error for score in scores if score.error is not None)
    if not reasons:
        return ""
    count = reasons.total()
    if len(reasons) == 1:
        return f"{count} of {len(scores)} responses: {next(iter(reasons))}"
    listed = [f"{reason} ({times})" for reason, times in reasons.most_common(_MOST_REASONS)]
    more = [f"{len(reasons) - _MOST_REASONS} other reasons"] if len(reasons) > _MOST_REASONS else []
    return f"{count} of {len(scores)} responses: {'; '.join([*listed, *more])}"


def prove(scores: Sequence[Score], *, of_sampled: float = 0.0) -> None:
    """Raises an error if the reward cannot score most of the first responses.

    Args:
        of_sampled: share of all sampled responses that could not be scored, if some of them were dropped and are not in
            `scores`.
    Raises:
        RewardFailedError: the reward failed on more than half of the responses by its own fault.
        RewardAwayError: a service did not answer for more than half.
    """
    away = sum(score.away for score in scores)
    own = sum(score.error is not None for score in scores) - away
    if 2 * own > len(scores):
        raise RewardFailedError(f"the reward failed on {failures(scores)}")
    if 2 * away > len(scores):
        raise RewardAwayError(f"the reward's service did not answer for {failures(scores)}")
    if of_sampled > 0.5:
        kind = RewardAwayError if away > own else RewardFailedError
        why = f"; among the responses that were kept: {failures(scores)}" if own or away else ""
        raise kind(f"the reward failed on {of_sampled:.0%} of the responses that were sampled for the step{why}")


@dataclass(frozen=True, slots=True)
class Place:
    """Run, directories and device of a scorer."""

    run: Path | None = None
    """The run's directory. None without a run; then calls to judges are not counted."""
    verdicts: Path | None = None
    """Directory of the judges' verdicts, which runs share; None if verdicts are not kept."""
    device: str = "cpu"
    """Type of the device on which a scoring model computes: cpu, cuda."""
    path: tuple[str | int, ...] = ("reward",)
    """Place of the reward in the spec."""

    @classmethod
    def of_run(cls, run: Path, device: str) -> Self:
        """Returns the place for a run's directory. The directory of verdicts is next to the directory of all runs."""
        return cls(run, run.absolute().parents[1] / "verdicts", device)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Group:
    """Responses to one prompt, which a reward may compare with each other."""

    size: int
    responses: dict[int, str] = field(default_factory=dict)
    """Responses that have ended, by index in the group."""


Member = tuple[Group, int]
"""A response's group, and the response's index in it."""


class Scorer(Protocol):
    """Scorer of responses. It is a context manager, because some scorers hold worker processes."""

    def submit(self, problem: Problem, response: str, member: "Member | None" = None) -> "Future[Score]":
        """Starts to score a response to the problem. Safe to call from any thread. A failure also gives a verdict.

        Args:
            member: the response's place in its group. None if it has none; then it is compared with nothing.
        """
        ...

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score]:
        """Returns one verdict per response, in order. `responses[i]` answers `problems[i]`. Raises the errors of the
        verdicts."""
        scores = [self.submit(*pair) for pair in zip(problems, responses, strict=True)]
        return [score.result() for score in scores]

    def close(self) -> None:
        """Ends the scorer. Waiting responses get no verdict."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
