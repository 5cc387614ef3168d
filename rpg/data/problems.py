"""A problem between its source and its prompt, and what makes two problems the same."""

import hashlib
import unicodedata
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""{role, content}, both texts, and whatever else a chat template may read, such as tool_calls."""


@dataclass(frozen=True, slots=True)
class SourceProblem:
    """One problem as its source has it."""

    prompt: str | list[Message]
    """Plain text, or chat messages."""
    answer: str
    dataset: str
    """Name of the set, or of the problem's origin where a column says it."""
    fields: dict[str, Any] = field(default_factory=dict)
    """What a template may show as {metadata.NAME}."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the scorer needs."""
    cluster: str = ""
    """Name of what it shares with other problems of its set; empty: nothing."""
    shown: tuple[str, ...] = ()
    """Names in `metadata` that an agent's program is given too, where the policy may come to see them."""
    where: str = field(default="", compare=False)
    """The row in words, for messages: `train.jsonl, line 3`; empty: it is of no table."""


@dataclass(frozen=True, slots=True)
class StagedProblem:
    """One problem with its prompt, as it is published."""

    problem_id: str
    prompt: str
    """The rendered text, or the JSON of the chat messages."""
    answer: str
    dataset: str
    metadata: dict[str, Any]
    cluster: str = ""
    """Name of what it shares with other problems of its set; empty: nothing."""
    shown: tuple[str, ...] = ()
    """See SourceProblem."""
    text: str = ""
    """The question in its source's words, without the spec's own template; is not published."""
    where: str = field(default="", compare=False)
    """See SourceProblem; is not published."""
    answered: bool = field(default=False, compare=False)
    """The last message of its prompt is an assistant's; is not published."""


def text_of(prompt: str | list[Message]) -> str:
    """The problem's text: the messages' contents, one after another, where it comes as messages."""
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def content_id(text: str) -> str:
    """Hash of the text; spacing and Unicode composition aside, the same text has the same one.

    Example:
        >>> content_id("1 +  1\\n=") == content_id(" 1 + 1 =")
        True
    """
    normal = " ".join(unicodedata.normalize("NFC", text).split())
    return hashlib.sha256(normal.encode("utf-8", "surrogatepass")).hexdigest()[:16]
