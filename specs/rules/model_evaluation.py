"""Rules for the evaluation of a model without training."""

from collections.abc import Iterator

from specs.errors import Issue
from specs.rules.files import context_length
from specs.schema.experiment import Experiment
from specs.schema.model import ScratchModel, TrainedTokenizer


def context(experiment: Experiment) -> Iterator[Issue]:
    """Yields an issue if a prompt and a whole response do not fit into the model's context."""
    tokens = context_length(experiment.model)
    section = "evaluation" if experiment.evaluation.max_response_length else "rollout"
    response = experiment.evaluation.max_response_length or experiment.rollout.max_response_length
    prompt = experiment.data.max_prompt_length
    if tokens and prompt + response > tokens:
        yield Issue(
            "prompt and response do not fit the model's context",
            (section, "max_response_length"),
            given=f"{prompt} + {response} = {prompt + response} tokens",
            allowed=f"at most {tokens} tokens together",
            hint="lower data.max_prompt_length or evaluation.max_response_length",
        )


def trained_tokenizer(experiment: Experiment) -> Iterator[Issue]:
    """Yields an issue for a tokenizer to be trained, since an evaluation has no training problems."""
    model = experiment.model
    if isinstance(model, ScratchModel) and isinstance(model.tokenizer, TrainedTokenizer):
        yield Issue(
            "there are no training problems for a tokenizer to be trained on",
            ("model", "tokenizer"),
            given="bpe",
            allowed="bytes",
        )


RULES = (context, trained_tokenizer)
