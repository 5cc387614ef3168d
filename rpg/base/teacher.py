"""Finds the files of the teacher that a spec names, and checks that its tokens are the policy's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rpg.base.stage import NamedModel, existing_model, look_at
from specs.errors import Issue, SpecError
from specs.schema.model import PretrainedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_PATH = ("reference", "path")


def teacher_directory(
    teacher: PretrainedModel, tokenizer: "PreTrainedTokenizerBase", config: "PretrainedConfig"
) -> Path:
    """Returns the teacher's model directory, after a download if the spec names a Hub id.

    Args:
        tokenizer: the policy's tokenizer.
        config: config of the policy's model.
    Raises:
        SpecError: the model does not exist, or its tokenizer differs.
    """
    with _blaming_reference():
        directory, its_config, its_tokenizer = existing_model(teacher)
    _compare(teacher, (tokenizer, config), (its_tokenizer, its_config))
    return directory


def look_at_teacher(teacher: PretrainedModel, policy: NamedModel) -> NamedModel:
    """Returns the teacher. Raises SpecError if training would refuse it, as far as this machine has the two models."""
    with _blaming_reference():
        found = look_at(teacher, build=False)
    if found.tokenizer and found.config and policy.tokenizer and policy.config:
        _compare(teacher, (policy.tokenizer, policy.config), (found.tokenizer, found.config))
    return found


@contextmanager
def _blaming_reference() -> Iterator[None]:
    try:
        yield
    except SpecError as error:
        raise SpecError(*(replace(issue, path=_PATH) for issue in error.issues)) from error


def _compare(
    teacher: PretrainedModel,
    policy: "tuple[PreTrainedTokenizerBase, PretrainedConfig]",
    of_teacher: "tuple[PreTrainedTokenizerBase, PretrainedConfig]",
) -> None:
    """Raises SpecError if a token id stands for another text in the teacher, or exceeds its number of logits."""
    own, its = policy[0].get_vocab(), of_teacher[0].get_vocab()
    if own != its:
        different = sorted(text for text, number in own.items() if its.get(text) != number)
        shown = ", ".join(repr(text) for text in different[:3]) or "tokens that the policy lacks"
        raise SpecError(
            Issue(
                "the teacher has another tokenizer than the policy",
                _PATH,
                given=f"{teacher.path}: {len(its)} tokens; they differ in {len(different) or len(its) - len(own)}, "
                f"such as {shown}",
                allowed=f"a model whose tokenizer has the policy's {len(own)} tokens at the same ids",
                hint="take a teacher of the policy's family: it scores exactly the tokens that the policy sampled",
            )
        )
    wide, wanted = (config.get_text_config().vocab_size for config in (of_teacher[1], policy[1]))
    if wide < wanted:
        raise SpecError(
            Issue(
                "the policy can sample tokens that the teacher has no logits for",
                _PATH,
                given=f"{teacher.path}: {wide} logits",
                allowed=f"at least the policy's {wanted}",
                hint="pad the teacher's embeddings: model.resize_token_embeddings",
            )
        )
