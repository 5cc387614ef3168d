"""A reward that takes its time: a run lasts long enough to be disturbed and leaves the processor to others."""

import time

from pydantic import Field

from rpg.rewards import Problem, Reward, Score


class SlowMatch(Reward):
    """1 for a response that begins with the gold answer, else 0, some time later."""

    seconds: float = Field(ge=0)
    """For each response."""

    def score(self, problem: Problem, response: str) -> Score:
        """See Reward."""
        time.sleep(self.seconds)
        return Score.of(float(response.strip().startswith(problem.answer)), response or None)
