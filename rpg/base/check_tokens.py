"""Checks that a model's tokenizer, chat template and prompts fit its embedding and its end tokens."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rpg.base.stage import NamedModel
from rpg.data.chat_template import TemplateError, render_all
from rpg.pretrained import embedding_size, special_tokens
from specs.errors import Issue
from specs.schema.data import ChatPrompt
from specs.schema.experiment import Experiment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAMED = 3
"""Largest number of rows or tokens that a message names."""
_SAID = "(the words of the policy)"


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt as the policy sees it, with its place in the data."""

    where: str
    """Place of the row: `train.jsonl, line 3`."""
    ids: list[int]


@dataclass(frozen=True, slots=True)
class TokenIssue:
    """A finding about tokens."""

    issue: Issue
    fatal: bool
    """Whether the finding would make a stage fail."""


def named_rows(rows: Sequence[str]) -> str:
    """Returns text that names the first rows and says how many more there are."""
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return "; ".join(rows[:_NAMED]) + more


def check_tokens(experiment: Experiment, model: NamedModel, rows: Sequence[Row]) -> Iterator[TokenIssue]:
    """Yields the token issues of a model that exists and is on this machine.

    Args:
        model: the experiment's model.
        rows: the first prompts of the experiment's sets.
    Raises:
        SpecError: the model has no end token.
    """
    tokenizer, config = model.tokenizer, model.config
    if model.directory is None or config is None or tokenizer is None:
        return
    ends = special_tokens(model.directory, tokenizer, config).eos_ids
    if size := embedding_size(config):
        yield from _beyond(tokenizer, size, rows)
    if ended := [row for row in rows if row.ids and row.ids[-1] in ends]:
        yield TokenIssue(_ended(experiment, tokenizer, ended, len(rows)), fatal=False)
    if isinstance(experiment.data.prompt, ChatPrompt) and tokenizer.chat_template:
        end = _end_of_turn(tokenizer)
        if end is not None and end not in ends:
            yield TokenIssue(_other_end(tokenizer, end, ends), fatal=False)


def _beyond(tokenizer: "PreTrainedTokenizerBase", size: int, rows: Sequence[Row]) -> Iterator[TokenIssue]:
    """Yields an issue if the tokenizer has ids that the embedding lacks; fatal if a prompt or the end token uses
    one."""
    beyond = {token: text for text, token in tokenizer.get_vocab().items() if token >= size}
    if not beyond:
        return
    using = [row for row in rows if any(token >= size for token in row.ids)]
    used = {token for row in using for token in row.ids if token >= size}
    used |= {tokenizer.eos_token_id} & beyond.keys()
    shown = sorted(used or beyond)
    named = ", ".join(f"`{beyond.get(token, token)}` ({token})" for token in shown[:_NAMED])
    given = named + (f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else "")
    if using:
        given += f", in {named_rows([row.where for row in using])}"
    message = f"the tokenizer has ids up to {max(beyond)}, and the model's embedding has {size} rows"
    hint = "take the tokenizer that belongs to the model, or resize the model's embedding to the tokenizer's length"
    if not used:
        hint += "; no checked prompt contains such a token"
    yield TokenIssue(Issue(message, ("model", "path"), given, f"ids up to {size - 1}", hint), fatal=bool(used))


def _ended(experiment: Experiment, tokenizer: "PreTrainedTokenizerBase", ended: Sequence[Row], looked_at: int) -> Issue:
    text = tokenizer.decode([ended[0].ids[-1]])
    if isinstance(experiment.data.prompt, ChatPrompt):
        hint = "take a chat template that begins the reply (add_generation_prompt)"
    else:
        hint = (
            "set add_eos_token to false in the model's tokenizer_config.json, or take the token out of the"
            " post_processor in its tokenizer.json: the policy has learnt to end there"
        )
    message = f"{len(ended)} of the first {looked_at} prompts end with the end token `{text}`"
    return Issue(message, ("data", "prompt"), named_rows([row.where for row in ended]), hint=hint)


def _end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Returns the added token with which the chat template ends a reply; None if it writes none."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
    try:
        (text,) = render_all(tokenizer, [json.dumps(messages)], add_generation_prompt=False)
    except TemplateError:
        return None
    rest = text.partition(_SAID)[2].lstrip()
    tokens = {added.content: token for token, added in tokenizer.added_tokens_decoder.items()}
    found = [text for text in tokens if text.strip() and rest.startswith(text)]
    return tokens[max(found, key=len)] if found else None


def _other_end(tokenizer: "PreTrainedTokenizerBase", end: int, ends: Sequence[int]) -> Issue:
    named = ", ".join(f"`{tokenizer.decode([token])}`" for token in ends)
    return Issue(
        f"the chat template ends a reply with `{tokenizer.decode([end])}`, at which no response ends",
        ("model", "path"),
        given=f"end tokens: {named}",
        hint=f"write eos_token_id: {[*ends, end]} into the model's generation_config.json",
    )
