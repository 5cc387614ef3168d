"""The score of a response, and what scores responses."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from pydantic import TypeAdapter

from rpg.messages import message
from rpg.types import Problem
from specs.schema.reward import Reward

FULL_MARK = 1.0
"""The value from which a response counts as correct, under every scorer."""
LONGEST_VERDICT = 16 << 20
"""Bytes. A verdict has the answer that was extracted, at most a whole response."""


@message
@dataclass(frozen=True, slots=True)
class Score:
    """One response's verdict."""

    value: float
    """The reward; 0 where the scorer failed."""
    correct: bool
    """The value reaches the full mark; of a weighted sum, that of the first term."""
    extracted: str | None = None
    """What the scorer read as the answer; None where it found none."""
    error: str | None = None
    """Why the scorer failed, where it did."""
    penalty: float = 0.0
    """Added to the value for what the scorer does not see, such as the length; at most 0."""
    terms: dict[str, float] = field(default_factory=dict)
    """Terms of a weighted sum: name of a term -> its value, not weighted."""

    @property
    def reward(self) -> float:
        """The number that training uses."""
        return self.value + self.penalty

    @classmethod
    def of(cls, value: float, extracted: str | None) -> Self:
        """The verdict of a scorer that worked."""
        return cls(value=value, correct=value >= FULL_MARK, extracted=extracted)

    @classmethod
    def failed(cls, error: str) -> Self:
        """The verdict where the scorer raised, hung or died."""
        return cls(value=0.0, correct=False, error=error)


_SCORE = TypeAdapter(Score)


def received(line: bytes | bytearray) -> Score:
    """The verdict that a worker sent as JSON. ValueError where it is none: what was scored may have written it."""
    score = _SCORE.validate_json(line, strict=True)
    if not all(map(math.isfinite, (score.value, score.penalty, *score.terms.values()))):
        raise ValueError("not a finite number")
    return score


def verdict(reward: Reward, problem: Problem, response: str) -> Score:
    """The reward's score of a response, or why there is none."""
    try:
        score = reward.score(problem, response)
    except Exception as error:
        return Score.failed(f"{type(error).__name__}: {error}"[:500])
    if not isinstance(score, Score) or not math.isfinite(score.value):
        return Score.failed(f"the scorer returned {score!r}"[:500])
    return score


class Scorer(Protocol):
    """Scores responses; a context manager, since some hold worker processes."""

    def submit(self, problem: Problem, response: str) -> "Future[Score]":
        """Begins to score a response, which answers the problem; any thread may call. A failure is a verdict too."""
        ...

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score]:
        """One verdict per response, in order; `responses[i]` answers `problems[i]`."""
        ...

    def close(self) -> None:
        """Ends the worker processes."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
