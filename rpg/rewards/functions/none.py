"""No reward: training learns only from the reference model."""

from typing import ClassVar

from rpg.rewards.score import Score
from rpg.types import Problem
from specs.schema.reward import Reward


class NoReward(Reward):
    """0 for every response, so that every advantage is 0 and only the divergence trains: distillation from `reference:
    {source: model}` on prompts without answers. Evaluation sets need their own `reward`."""

    in_process: ClassVar[bool] = True

    def score(self, problem: Problem, response: str) -> Score:  # noqa: ARG002 (see Reward)
        """See Reward."""
        return Score.of(0.0, None)
