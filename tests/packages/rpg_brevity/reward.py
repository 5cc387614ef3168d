"""A reward for responses that are short."""

from typing import ClassVar

from pydantic import Field

from rpg.rewards import Problem, Reward, Score


class Brevity(Reward):
    """1 for a response of at most `target` characters, less for a longer one."""

    in_process: ClassVar[bool] = False

    target: int = Field(ge=1)
    """Characters."""
    slope: float = Field(0.1, gt=0)
    """Reward taken off for each character more."""

    def score(self, problem: Problem, response: str) -> Score:  # noqa: ARG002 (its interface)
        """See Reward."""
        return Score.of(max(0.0, 1 - self.slope * max(0, len(response) - self.target)), response or None)
