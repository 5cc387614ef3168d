"""Tokens of texts that a policy, a tool or a client wrote: nothing in them becomes a control token.

A control token is one that a tokenizer has beside its vocabulary: an end of a turn, a call of a tool. A template writes
them; a text that it surrounds may only spell them.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\ue000{}\ue001"
"""Stands for a text while a template writes what is around it."""
_MARKED = re.compile("\ue000([0-9]+)\ue001")


def mark(place: int) -> str:
    """Returns the mark of the text at a place."""
    return _MARK.format(place)


def unmarked(text: str) -> str:
    """Returns a text without marks."""
    return _MARKED.sub(r"\1", text)


def plain_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Returns the token ids of a text, none of which is a control token."""
    ids: list[int] = _plain(tokenizer, text)
    controls = _controls(tokenizer)
    if not controls.isdisjoint(ids):
        # One that is not marked as special, or that the vocabulary has too.
        ids = [token for part in _cut(tokenizer, text) for token in _plain(tokenizer, part)]
    if not controls.isdisjoint(ids):
        # One that the tokenizer reads in another spelling.
        ids = [token for character in text for token in _plain(tokenizer, character) if token not in controls]
    return ids


def spelled(tokenizer: "PreTrainedTokenizerBase", value: Any) -> Any:
    """Returns a value of JSON whose texts have a space in what would become a control token, and no marks.

    It is for the parts of a message that a template writes in ways of its own. Some tokenizers change a text before
    they look for control tokens: a text in which they still find one has a space between all its characters.
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
    """Returns the token ids of what a template wrote, with texts in the places of their marks."""
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

    They are those of the whole text, as a model was trained with them, unless something that was said would become a
    control token: then each text is encoded by itself.

    Args:
        said: the texts of the conversation.
        render: writes the conversation around such texts.
    """
    text = render(said)
    template = render([mark(place) if each else "" for place, each in enumerate(said)])
    whole: list[int] = tokenizer.encode(text, add_special_tokens=False)
    around = [tokenizer.encode(piece, add_special_tokens=False) for piece in _MARKED.split(template)[::2] if piece]
    if _among(tokenizer, whole) == [token for ids in around for token in _among(tokenizer, ids)]:
        # A template that looks into the texts might leave out a token of its own where a text has another.
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
    """Returns the text in parts, cut behind the first character of each control token that it spells."""
    if (spelling := _spelling(tokenizer)) is None:
        return [text]
    begins = [match.start() + 1 for match in spelling.finditer(text)]
    return [text[begin:end] for begin, end in zip([0, *begins], [*begins, len(text)], strict=True)]


@lru_cache(maxsize=16)
def _controls(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Returns the ids of the control tokens.

    Added tokens that are words or white space alone are none, and the token of unknown characters is none.
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
    """Returns a pattern of the control tokens' beginnings; None where there is none."""
    added = tokenizer.added_tokens_decoder
    texts = sorted({added[token].content for token in _controls(tokenizer)} - {""}, key=len, reverse=True)
    if not texts:
        return None
    first = "".join(sorted({re.escape(text[0]) for text in texts}))
    # The first characters alone are soon compared. A look ahead finds one token inside another too.
    return re.compile(f"(?=[{first}])(?={'|'.join(map(re.escape, texts))})")
