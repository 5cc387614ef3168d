"""Loads an evaluation's problems and checks that they fit the model. Cheap enough to do before training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rpg.data.loading import encode_prompts, load_problems
from rpg.pretrained import config_of, context_of
from rpg.types import Problem
from specs import errors
from specs.schema.experiment import Experiment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EvaluationInputs:
    """The problems of the chosen sets, with prompts as the model sees them."""

    problems: list[Problem]
    prompts: list[list[int]]
    """Token ids of each problem's prompt."""
    max_response_length: int

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt plus the longest response; 0 without problems."""
        return max(map(len, self.prompts)) + self.max_response_length if self.prompts else 0

    def share(self, places: Sequence[int]) -> "EvaluationInputs":
        """Returns the problems with these indices."""
        return replace(
            self, problems=[self.problems[place] for place in places], prompts=[self.prompts[place] for place in places]
        )


def evaluation_inputs(
    spec: Experiment, data_dir: Path, base_dir: Path, tokenizer: "PreTrainedTokenizerBase"
) -> EvaluationInputs:
    """Loads the evaluation problems that the spec chooses.

    Raises:
        SpecError: a set is missing, a prompt is longer than max_prompt_length, or the context is too short.
    """
    problems = _of_chosen_sets(
        load_problems(data_dir, "evaluation", tokenizer, spec.data, spec.rollout.rollouter.shown_tools), spec
    )
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems], spec.data)
    response = spec.evaluation.max_response_length or spec.rollout.max_response_length
    inputs = EvaluationInputs(problems, prompts, response)
    _check_context(spec, base_dir, inputs)
    return inputs


def _of_chosen_sets(problems: list[Problem], spec: Experiment) -> list[Problem]:
    there = sorted({problem.dataset for problem in problems})
    wanted = spec.evaluation.datasets
    unknown = [name for name in wanted if name not in there]
    if unknown:
        raise errors.SpecError(
            errors.Issue(
                "no such evaluation set",
                path=("evaluation", "datasets"),
                given=", ".join(unknown),
                allowed=", ".join(there),
            )
        )
    return [problem for problem in problems if not wanted or problem.dataset in wanted]


def _check_context(spec: Experiment, base_dir: Path, inputs: EvaluationInputs) -> None:
    context = context_of(config_of(base_dir))
    if context is None or inputs.max_length <= context:
        return
    section = "evaluation" if spec.evaluation.max_response_length else "rollout"
    raise errors.SpecError(
        errors.Issue(
            "the model's context is too short for the longest evaluation prompt and a whole response",
            path=(section, "max_response_length"),
            given=f"{inputs.max_length - inputs.max_response_length} + {inputs.max_response_length} tokens",
            allowed=f"at most {context} tokens together",
            hint=f"lower {section}.max_response_length",
        )
    )
