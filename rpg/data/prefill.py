"""Finds the beginning of a reply that a template itself writes, such as `<think>`. Responses do not repeat it."""

import json
import re
from typing import TYPE_CHECKING, Any

from rpg.data.chat_template import TemplateError, render_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAID = "(the words of the policy)"
_CLOSED = re.compile(r"\s*<([^<>/\s]+)>\s*</\1>\s*")
"""Pattern of a thought that the template itself opens and closes, as Qwen3's template does with thinking disabled."""


_BEGUN = re.compile(r"<[^<>/\s]+>\s*\Z")
_THOUGHT = re.compile(r"<think>\s*\Z")


def begun(template: str, prompt: str) -> str:
    """Returns the tag that a template of plain text ends with, or `<think>` at the end of the prompt itself.

    Example:
        >>> begun("{prompt} Assistant: <think>", "1 + 1? Assistant: <think>"), begun("{prompt}", "Go on: <p>")
        ('<think>', '')
    """
    found = _BEGUN.search(template) or _THOUGHT.search(prompt)
    return found[0] if found else ""


class Prefills:
    """The beginnings of replies to prompts from one chat template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", **options: Any) -> None:
        """Finds the template's header of replies. `options` are passed to the template."""
        self._tokenizer = tokenizer
        self._header = _header(tokenizer, options)

    def of(self, prompt: str) -> str:
        """Returns the text after the last reply header in a prompt, without control tokens.

        It is empty if the template writes no text there, or writes a complete empty thought.
        """
        if not self._header:
            return ""
        _, found, written = prompt.rpartition(self._header)
        if not found or not written.strip() or _CLOSED.fullmatch(written):
            return ""
        ids = self._tokenizer.encode(written, add_special_tokens=False)
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _header(tokenizer: "PreTrainedTokenizerBase", options: dict[str, Any]) -> str:
    """Returns the header that the template writes before a reply; empty if it takes no conversation.

    It is the longest prefix of the generation prompt with which earlier replies begin too.
    """
    asked = [{"role": "user", "content": "?"}]
    spoken = [*asked, {"role": "assistant", "content": _SAID}, *asked]
    try:
        (whole,) = render_all(tokenizer, [json.dumps(asked)], **options)
        ended = [json.dumps(messages) for messages in (asked, spoken)]
        bare, talk = render_all(tokenizer, ended, add_generation_prompt=False, **options)
    except TemplateError:
        return ""
    before, said, _ = talk.partition(_SAID)
    begun = whole.removeprefix(bare) if said and whole.startswith(bare) else ""
    return next((begun[:length] for length in range(len(begun), 0, -1) if before.endswith(begun[:length])), "")
