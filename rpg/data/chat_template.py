"""Chat templates come with a model, which other people may have made: all are rendered here, under limits."""

import json
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from specs.machine.foreign.limited import LimitError, in_limited_process, limited_seconds

MOST_SECONDS = 10.0
"""Time for one conversation: a thousand times what published templates take."""
_MOST_SECONDS_OF_ALL, _MORE_SECONDS_EACH = 60.0, 0.02
"""Time for all conversations: so much, and so much more for each. A published template takes 0.1 to 2 ms for each."""
_MOST_MEMORY = 2 << 30
"""Bytes that rendering may take."""


_CLOCK = "RPG_TEMPLATE_CLOCK"
"""Variable with the time that templates read, ISO: of this process and those that it starts."""


def stop_clock(data_dir: Path) -> None:
    """Has templates read the time at which the data was staged, here and in processes that this one starts.

    Some write today's date into each prompt. A run that is resumed, or asked for again, on another day goes on with the
    prompts that it began with.
    """
    summary = data_dir / "summary.json"
    if summary.exists():
        # Without it the file's own time counts.
        written = datetime.fromtimestamp(summary.stat().st_mtime)
        os.environ[_CLOCK] = json.loads(summary.read_text(encoding="utf-8")).get("staged_at") or written.isoformat()


def _clock() -> dict[str, Callable[[str], str]]:
    """Returns the function that templates ask for the time, by its name in transformers."""
    now = datetime.fromisoformat(os.environ[_CLOCK]) if _CLOCK in os.environ else datetime.now()
    return {"strftime_now": now.strftime}


class TemplateError(Exception):
    """The template raised, or passed a limit. `str()` says which."""


def render_all(tokenizer: Any, prompts: Sequence[str], **options: Any) -> list[str]:
    """Returns conversations as the tokenizer's template writes them, each with the beginning of the reply.

    Rendered in a process of its own, since no limit in this one ends a calculation such as 9**9**9.

    Args:
        tokenizer: transformers' own.
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
    """Returns one conversation as the tokenizer's template writes it, rendered here under a limit of time.

    For the turns of a conversation, for which a process each would take too long. The limit ends a loop of the
    template, but no calculation such as 9**9**9, and memory has no limit here.

    Raises:
        TemplateError: the template fails on it.
    """
    try:
        with limited_seconds(MOST_SECONDS):
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **_clock(), **options))
    except MemoryError:
        raise TemplateError("the chat template took too much memory") from None
    except Exception as error:  # whatever a template raises of roles that it does not know
        raise TemplateError(f"the chat template fails: {type(error).__name__}: {error}"[:500]) from None
