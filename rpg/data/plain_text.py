"""Encodes texts that a policy, a tool or a client wrote. Nothing in such a text becomes a control token.

A control token is a token outside the tokenizer's ordinary vocabulary, such as the end of a turn or a tool call. A
template writes control tokens; a text inside it may only contain their spelling.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\ue000{}\ue001"
"""Placeholder for a text while a template renders its surroundings."""
_MARKED = re.compile("\ue000([0-9]+)\ue001")


def mark(place: int) -> str:
    """Returns the mark for the text at an index."""
    return _MARK.format(place)


def unmarked(text: str) -> str:
    """Returns a text without marks."""
    return _MARKED.sub(r"\1", text)


def plain_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Returns the token ids of a text, none of which is a control token."""
    ids: list[int] = _plain(tokenizer, text)
    controls = _controls(tokenizer)
    if not controls.isdisjoint(ids):
        # A token that is not marked as special, or that is also in the vocabulary.
        ids = [token for part in _cut(tokenizer, text) for token in _plain(tokenizer, part)]
    if not controls.isdisjoint(ids):
        # A token that the tokenizer recognises in another spelling.
        ids = [token for character in text for token in _plain(tokenizer, character) if token not in controls]
    return ids


def spelled(tokenizer: "PreTrainedTokenizerBase", value: Any) -> Any:
    """Returns a JSON value with a space inside each text that would become a control token, and without marks.

    It is for the parts of a message that a template renders in its own way. Some tokenizers change a text before they
    look for control tokens: if they still find one, a space goes between all characters of the text.
    """
    match value:
        case str():
            text = " ".join(_cut(tokenizer, unmarked(value)))
            if _spells(tokenizer, text):
                controls = {each for each in {*text} if _spells(tokenizer, each)}
                text = " ".join(each for each in text if each not in controls)
            return "" if _spells(tokenizer, text) else text
        case dict():
            return {spelled(tokenizer, name): spelled(tokenizer, each) for name, each in value.items()}
        case list() | tuple():
            return [spelled(tokenizer, each) for each in value]
    return value


def rendered_ids(tokenizer: "PreTrainedTokenizerBase", text: str, said: Sequence[str]) -> list[int]:
    """Returns the token ids of a rendered template, with texts in place of their marks."""
    ids: list[int] = []
    for place, piece in enumerate(_MARKED.split(text)):
        if place % 2:
            ids += plain_ids(tokenizer, said[int(piece)])
        elif piece:
            ids += tokenizer.encode(piece, add_special_tokens=False)
    return ids


def conversation_ids(
    tokenizer: "PreTrainedTokenizerBase", said: Sequence[str], render: Callable[[Sequence[str]], str]
) -> list[int]:
    """Returns the token ids of a conversation.

    They encode the whole text, as in the model's training, unless a text would become a control token: then each text
    is encoded separately.

    Args:
        said: the texts of the conversation.
        render: writes the conversation around such texts.
    """
    text = render(said)
    template = render([mark(place) if each else "" for place, each in enumerate(said)])
    whole: list[int] = tokenizer.encode(text, add_special_tokens=False)
    around = [tokenizer.encode(piece, add_special_tokens=False) for piece in _MARKED.split(template)[::2] if piece]
    if _among(tokenizer, whole) == [token for ids in around for token in _among(tokenizer, ids)]:
        # A template that inspects the texts might omit its own token if a text contains another.
        is_opaque = text == _MARKED.sub(lambda match: said[int(match[1])], template)
        alone = (tokenizer.encode(each, add_special_tokens=False) for each in said)
        if is_opaque or not any(_among(tokenizer, ids) for ids in alone):
            return whole
    return rendered_ids(tokenizer, template, said)


def _plain(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) if text else []
    return ids


def _among(tokenizer: "PreTrainedTokenizerBase", ids: Iterable[int]) -> list[int]:
    """Returns the control tokens among token ids, in their order."""
    controls = _controls(tokenizer)
    return [token for token in ids if token in controls]


def _spells(tokenizer: "PreTrainedTokenizerBase", text: str) -> bool:
    """Returns whether a tokenizer finds a control token in a text."""
    return bool(text and _among(tokenizer, tokenizer.encode(text, add_special_tokens=False)))


def _cut(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[str]:
    """Returns the text in parts, which are cut after the first character of each control token that the text spells."""
    if (spelling := _spelling(tokenizer)) is None:
        return [text]
    begins = [match.start() + 1 for match in spelling.finditer(text)]
    return [text[begin:end] for begin, end in zip([0, *begins], [*begins, len(text)], strict=True)]


@lru_cache(maxsize=16)
def _controls(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Returns the ids of the control tokens.

    Added tokens that are only words or white space do not count, nor does the token of unknown characters.
    """
    ids = {
        token
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special or any(not (each.isalnum() or each.isspace() or each == "\u2581") for each in added.content)
    }
    if tokenizer.unk_token_id not in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        ids.discard(tokenizer.unk_token_id)
    return frozenset(ids)


@lru_cache(maxsize=16)
def _spelling(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str] | None:
    """Returns a pattern that matches the beginnings of control tokens; None if the tokenizer has no control token."""
    added = tokenizer.added_tokens_decoder
    texts = sorted({added[token].content for token in _controls(tokenizer)} - {""}, key=len, reverse=True)
    if not texts:
        return None
    first = "".join(sorted({re.escape(text[0]) for text in texts}))
    # Comparing only first characters is fast. The lookahead also finds one token inside another.
    return re.compile(f"(?=[{first}])(?={'|'.join(map(re.escape, texts))})")
