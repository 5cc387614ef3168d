"""Loads an evaluation's problems and checks that they fit the model. This is cheap enough to do before training."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rpg.data.loading import encode_prompts, load_problems
from rpg.data.unanswered import load_items
from rpg.evaluation.likelihood import TokenizedSet, tokenized_sets
from rpg.evaluation.lm_tasks import TaskSet
from rpg.pretrained import config_of, context_of
from rpg.types import Problem
from specs import errors
from specs.schema.experiment import Experiment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EvaluationInputs:
    """The problems of the chosen sets, with prompts as the model sees them, and the sets that are scored by
    likelihood."""

    problems: list[Problem]
    prompts: list[list[int]]
    """Token ids of each problem's prompt."""
    max_response_length: int
    unanswered: list[TokenizedSet | TaskSet] = field(default_factory=list)
    """The chosen sets that are scored by likelihood."""

    @property
    def exist(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self.problems or self.unanswered)

    @property
    def max_length(self) -> int:
        """Returns the number of tokens of the longest prompt plus the longest response; 0 without problems."""
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
    problems = load_problems(data_dir, "evaluation", tokenizer, spec.data, spec.rollout.rollouter.shown_tools)
    items = load_items(data_dir)
    wanted = _chosen_sets(spec, {each.dataset for each in problems} | {each.dataset for each in items})
    problems = [problem for problem in problems if problem.dataset in wanted]
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems], spec.data)
    response = spec.evaluation.max_response_length or spec.rollout.max_response_length
    chosen = [item for item in items if item.dataset in wanted]
    context = context_of(config_of(base_dir))
    unanswered: list[TokenizedSet | TaskSet] = [
        *tokenized_sets([item for item in chosen if item.kind != "lm_eval"], tokenizer, context),
        *(
            TaskSet(item, tokenizer, context or 0, spec.evaluation.confidence)
            for item in chosen
            if item.kind == "lm_eval"
        ),
    ]
    inputs = EvaluationInputs(problems, prompts, response, unanswered)
    _check_context(spec, base_dir, inputs)
    return inputs


def _chosen_sets(spec: Experiment, there: Collection[str]) -> Collection[str]:
    """Returns the names of the sets to evaluate."""
    unknown = [name for name in spec.evaluation.datasets if name not in there]
    if unknown:
        raise errors.SpecError(
            errors.Issue(
                "no such evaluation set",
                path=("evaluation", "datasets"),
                given=", ".join(unknown),
                allowed=", ".join(sorted(there)),
            )
        )
    return spec.evaluation.datasets or there


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
