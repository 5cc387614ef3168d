"""A reward for answering in few words."""

from pydantic import Field

from rpg.rewards import Problem, Reward, Score


class Brevity(Reward):
    """1 for a response hardly longer than the gold answer, less for a longer one, at least 0."""

    spare: int = Field(ge=1)
    """Characters more than those of the gold answer that cost nothing."""
    slope: float = Field(0.1, gt=0)
    """Reward taken off for each character beyond."""

    def score(self, problem: Problem, response: str) -> Score:
        """See Reward."""
        beyond = max(0, len(response) - len(problem.answer) - self.spare)
        return Score.of(max(0.0, 1 - self.slope * beyond), response or None)
