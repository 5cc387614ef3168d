"""Equality of texts."""

from rpg.rewards.score import Score
from rpg.types import Problem


def score(problem: Problem, response: str) -> Score:
    """1 where response and gold answer are the same text, surrounding white space aside, else 0."""
    extracted = response.strip()
    return Score.of(1.0 if extracted == problem.answer.strip() else 0.0, extracted or None)
