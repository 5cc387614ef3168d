"""Renders chat templates under limits: they come with a model, which may be untrusted."""

import json
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from specs.machine.foreign.limited import LimitError, in_limited_process, limited_seconds
from specs.schema.data import ChatPrompt, TemplatePrompt

MOST_SECONDS = 10.0
"""Time limit in seconds for one conversation, a thousand times what published templates take."""
_MOST_SECONDS_OF_ALL, _MORE_SECONDS_EACH = 60.0, 0.02
"""Time limit in seconds for all conversations: a fixed part, and a part per conversation. A published template takes
0.1 to 2 ms per conversation."""
_MOST_MEMORY = 2 << 30
"""Largest number of bytes of memory that rendering may take."""


_CLOCK = "RPG_TEMPLATE_CLOCK"
"""Environment variable with the time (ISO 8601) that templates read, in this process and those that it starts."""


def stop_clock(data_dir: Path) -> None:
    """Makes templates read the time at which the data was staged, in this process and those that it starts.

    Some templates write today's date into each prompt. A run that is resumed or repeated on another day keeps the
    prompts with which it began.
    """
    summary = data_dir / "summary.json"
    if summary.exists():
        # Without an entry the file's own time counts.
        written = datetime.fromtimestamp(summary.stat().st_mtime)
        os.environ[_CLOCK] = json.loads(summary.read_text(encoding="utf-8")).get("staged_at") or written.isoformat()


def _clock() -> dict[str, Callable[[str], str]]:
    """Returns the function from which templates get the time, by its name in transformers."""
    now = datetime.fromisoformat(os.environ[_CLOCK]) if _CLOCK in os.environ else datetime.now()
    return {"strftime_now": now.strftime}


class TemplateError(Exception):
    """Error raised if a template raises or exceeds a limit. `str()` says which."""


def choose_template(tokenizer: Any, prompt: TemplatePrompt | ChatPrompt) -> None:
    """Sets the spec's own chat template, if it has one, on a transformers tokenizer."""
    if isinstance(prompt, ChatPrompt) and prompt.chat_template:
        tokenizer.chat_template = prompt.chat_template


def render_all(tokenizer: Any, prompts: Sequence[str], **options: Any) -> list[str]:
    """Returns conversations as the tokenizer's template renders them, each with the beginning of the reply.

    Renders in a separate process, since no limit in this one ends a calculation such as 9**9**9.

    Args:
        tokenizer: a tokenizer of transformers.
        prompts: lists of messages, as JSON.
        options: passed to the template.
    Raises:
        TemplateError: the template fails on one of them.
    """
    if not prompts:
        return []
    arguments = {"tokenize": False, "add_generation_prompt": True} | _clock() | options
    texts: list[str] = []
    try:
        for text in in_limited_process(
            lambda: (str(tokenizer.apply_chat_template(json.loads(prompt), **arguments)) for prompt in prompts),
            seconds=MOST_SECONDS,
            memory=_MOST_MEMORY,
            total=_MOST_SECONDS_OF_ALL + _MORE_SECONDS_EACH * len(prompts),
        ):
            texts.append(text)
    except LimitError as error:
        raise TemplateError(f"the chat template fails on prompt {len(texts) + 1}: {error}") from None
    return texts


def render(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """Returns one conversation as the tokenizer's template renders it, in this process under a time limit.

    This is for the turns of a conversation, for which a process each would take too long. The limit ends a loop of the
    template, but not a calculation such as 9**9**9, and memory is unlimited here.

    Raises:
        TemplateError: the template fails on it.
    """
    try:
        with limited_seconds(MOST_SECONDS):
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **_clock(), **options))
    except MemoryError:
        raise TemplateError("the chat template took too much memory") from None
    except Exception as error:  # any error that a template raises for unknown roles
        raise TemplateError(f"the chat template fails: {type(error).__name__}: {error}"[:500]) from None
