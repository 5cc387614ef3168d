"""Equality of texts."""

from typing import ClassVar

from rpg.rewards.score import Score, odd_as_text, without_answer
from rpg.types import Problem
from specs.errors import Issue
from specs.schema.reward import Reward


class ExactMatch(Reward):
    """1 if response and gold answer are the same text, ignoring surrounding white space, else 0."""

    largest: ClassVar[float] = 1.0
    in_process: ClassVar[bool] = True

    def objects_to(self, problem: Problem) -> Issue | None:
        """See Reward."""
        return without_answer(problem, self.type)

    def doubts(self, answer: str) -> str:
        """See Reward."""
        return odd_as_text(answer)

    def score(self, problem: Problem, response: str) -> Score:
        """See Reward. The extracted answer is the whole response."""
        extracted = response.removeprefix(problem.prefill).strip()
        return Score.of(1.0 if extracted == problem.answer.strip() else 0.0, extracted or None)
