"""The scorers that come with reasoning-gym's tasks. Some run the answer as Python: in a sealed process only."""

import json
import re
from functools import lru_cache
from typing import Any, ClassVar, Literal

from rpg.rewards.comparing import only_compares
from rpg.rewards.score import Score
from rpg.types import Problem
from specs.errors import Issue
from specs.schema.data import Source
from specs.schema.reward import Reward

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(Reward):
    """The task's own mark, from 0 to 1; partial credit is the task's affair. For reasoning-gym's problems only. Needs
    bubblewrap: some of the scorers run the answer."""

    libraries: ClassVar[tuple[str, ...]] = ("reasoning-gym", "python")
    sealed: ClassVar[Literal["always"]] = "always"

    def refuses(self, source: Source) -> Issue | None:
        """See Reward."""
        if source.source == "reasoning_gym":
            return None
        return Issue(
            "reward.type reasoning_gym scores reasoning-gym's own problems only",
            given=source.source,
            hint="take another reward.type: math_verify, math_dapo or exact_match",
        )

    def prepare(self) -> None:
        """See Reward."""
        from rpg.data import reasoning_gym_imported  # noqa: F401

    def runs(self, problem: Problem) -> bool:
        """See Reward. Most of the tasks compare alone, as their source says."""
        task: type = type(_task_of(problem))
        return not only_compares(task, "score_answer", frozenset({"config"}))

    def score(self, problem: Problem, response: str) -> Score:
        """See Reward.

        The answer is what stands in the last <answer> tag, as reasoning-gym's own system prompts ask for, else the
        whole response; white space around it does not count. `problem.metadata` is what the data stage wrote: task,
        config and the generator's entry.
        """
        tagged = _TAGGED.findall(response)
        extracted = (tagged[-1] if tagged else response).strip()
        value = float(_task_of(problem).score_answer(extracted, problem.metadata["entry"]))
        return Score.of(value, extracted or None)


def _task_of(problem: Problem) -> Any:
    """The task's dataset, which scores. ValueError where the problem comes from elsewhere."""
    origin = problem.metadata
    if "entry" not in origin:
        raise ValueError(f"problem {problem.problem_id} does not come from reasoning_gym: it has no task to score it")
    return _task(origin["task"], json.dumps(origin["config"], sort_keys=True))


@lru_cache(maxsize=64)
def _task(name: str, config: str) -> Any:
    from rpg.data.reasoning_gym_imported import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(config))
