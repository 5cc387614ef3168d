"""Problems before they get their prompt, and the identity of problems."""

import hashlib
import unicodedata
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""{role, content}, both texts, and any other keys that a chat template may read, such as tool_calls."""


@dataclass(frozen=True, slots=True)
class SourceProblem:
    """A problem as read from its source."""

    prompt: str | list[Message]
    """Plain text, or chat messages."""
    answer: str
    dataset: str
    """Name of the set, or of the problem's origin if a column names it."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Values that a template may show as {metadata.NAME}."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Data that the scorer needs."""
    cluster: str = ""
    """Name of the cluster of related problems in its set; empty if it belongs to no cluster."""
    shown: tuple[str, ...] = ()
    """Keys of `metadata` that are also passed to an agent's program, in which the policy may see them."""
    where: str = field(default="", compare=False)
    """Place of the row, for messages: `train.jsonl, line 3`. Empty if it is not from a table."""


@dataclass(frozen=True, slots=True)
class StagedProblem:
    """A problem with its prompt, as it is published."""

    problem_id: str
    prompt: str
    """The rendered text, or the JSON of the chat messages."""
    answer: str
    dataset: str
    metadata: dict[str, Any]
    cluster: str = ""
    """Name of the cluster of related problems in its set; empty if it belongs to no cluster."""
    shown: tuple[str, ...] = ()
    """See SourceProblem."""
    text: str = ""
    """The question as in its source, without the spec's own template; not published."""
    where: str = field(default="", compare=False)
    """See SourceProblem; not published."""
    answered: bool = field(default=False, compare=False)
    """Whether the last message of its prompt is an assistant's; not published."""


def text_of(prompt: str | list[Message]) -> str:
    """Returns the problem's text, or the contents of its messages one after another."""
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def content_id(text: str) -> str:
    """Returns a hash of the text. It ignores spacing and Unicode composition.

    Example:
        >>> content_id("1 +  1\\n=") == content_id(" 1 + 1 =")
        True
    """
    normal = " ".join(unicodedata.normalize("NFC", text).split())
    return hashlib.sha256(normal.encode("utf-8", "surrogatepass")).hexdigest()[:16]
