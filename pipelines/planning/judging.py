"""The work of models that score, such as judges: calls, tokens, money, memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpg.rewards.functions.judge import Judge
from rpg.rewards.functions.reward_model import RewardModel
from specs.schema.experiment import Experiment
from specs.schema.reward import Reward

_CHARACTERS_A_TOKEN = 4
_OWN_WORDS = 200
"""Tokens of a question besides rubric, problem and answers."""


@dataclass(frozen=True, slots=True)
class Judging:
    """Upper bound on the work of one judge in a run."""

    judge: str
    calls: int
    """Calls during training. Cached verdicts cost no call. Evaluations are not included, because the sizes of their
    sets are unknown."""
    question_tokens: int
    """Approximate: tokens of the policy are counted as tokens of the judge."""
    reply_tokens: int
    money: float | None
    """Cost in the currency of the price. None if the spec gives no price."""
    bound: str
    """The budget, in words. Empty if unlimited."""


def judging(experiment: Experiment) -> list[Judging]:
    """Returns one entry for each judge that scores training."""
    asked: list[Judging] = []
    for at, reward in experiment.rewards():
        if "evaluation" not in at:
            asked += [_of(part, experiment) for part in reward.parts() if isinstance(part, Judge)]
    return asked


def scoring_memory(experiment: Experiment) -> int:
    """Returns the bytes of a rank's device that its scoring models take. Models on a CPU are not counted."""
    if experiment.resources.device == "cpu":
        return 0
    distinct = {repr(part.identity()): part for _, reward in experiment.rewards() for part in reward.parts()}
    return sum(_memory(part, experiment) for part in distinct.values())


def _of(judge: Judge, experiment: Experiment) -> Judging:
    training, rollout = experiment.training, experiment.rollout
    rounds = rollout.dynamic_sampling.max_batches if rollout.dynamic_sampling else 1
    groups = training.steps * training.prompts_per_step * rounds
    calls = judge.calls(groups, training.group_size)
    answers = {"each": 1, "pairs": 2, "group": training.group_size}[judge.compare]
    words = len(judge.rubric) // _CHARACTERS_A_TOKEN + (len(judge.template) // _CHARACTERS_A_TOKEN or _OWN_WORDS)
    question = words + experiment.data.max_prompt_length + answers * rollout.max_response_length
    price = judge.price
    money = calls * (question * price.input + judge.reply_tokens * price.output) / 1e6 if price else None
    budget = judge.budget
    bounds = [f"{budget.calls} calls" if budget.calls else "", f"{budget.money:g} of money" if budget.money else ""]
    return Judging(
        judge=judge.model,
        calls=calls,
        question_tokens=calls * question,
        reply_tokens=calls * judge.reply_tokens,
        money=money,
        bound=" and ".join(filter(None, bounds)),
    )


def _memory(part: Reward, experiment: Experiment) -> int:
    """Returns the bytes of a judge: its share of the GPU with vLLM, else the model's weights."""
    if isinstance(part, Judge) and not part.endpoint:
        gpu = int(experiment.resources.memory_gib * 2**30)
        if part.engine_here("cuda") == "vllm" and gpu:
            return int(gpu * part.vllm_share)
        return _weights(part.model)
    return _weights(part.path) if isinstance(part, RewardModel) else 0


def _weights(directory: str) -> int:
    return sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))


def sentences(asked: list[Judging], count: Any) -> list[str]:
    """Returns a line of the plan for each judge; `count` formats a number of tokens."""
    lines = []
    for each in asked:
        money = "" if each.money is None else f", at most {each.money:,.2f} in the currency of its price"
        bound = f"; the budget ends the run at {each.bound}" if each.bound else ""
        lines.append(
            f"judge   {each.judge}: at most {each.calls:,} calls a run, about {count(each.question_tokens)} tokens of "
            f"questions and at most {count(each.reply_tokens)} of replies{money}; evaluations are not included{bound}"
        )
    return lines
