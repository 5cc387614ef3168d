"""A reward that says how good a response is, and not whether it is right."""

from typing import ClassVar

from rpg.rewards import Problem, Reward, Score


class Digits(Reward):
    """The sum of the code points of a response's characters, over 100 and less 3; at least -9."""

    graded: ClassVar[bool] = True
    worst: ClassVar[float | None] = -9.0
    in_process: ClassVar[bool] = True

    def score(self, problem: Problem, response: str) -> Score:  # noqa: ARG002 (any answer is worth what it says)
        """See Reward."""
        return Score.of(max(-9.0, sum(map(ord, response)) / 100 - 3), response or None)
