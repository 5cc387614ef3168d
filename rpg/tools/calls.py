"""Reading of calls in text that the policy sampled, and writing of answers as tokens for the policy.

A format reads calls from the text of a sampled turn and supplies the markup around an answer. The text of an answer is
never read as markup: a tokenizer's special tokens in it are plain characters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, assert_never

from rpg.data.chat_template import TemplateError, render
from rpg.data.plain_text import plain_ids
from rpg.pretrained import end_texts
from rpg.tools.tool import Tool
from specs.documents.strict_json import NotJsonError, parse_json
from specs.errors import Issue, SpecError
from specs.schema.rollout import HermesFormat, TagsFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_LONGEST_TOKEN = 256
"""Longest token, in characters. An answer may be a mebibyte long; at most its token limit times this length is
tokenized."""
_SAID, _TOLD = "(what the policy said)", "(what the tool told)"
"""Placeholders in an artificial conversation, from which the markup that a template writes around an answer is
found."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was read from sampled text."""

    tool: str
    """Name of the tool, as the policy wrote it."""
    arguments: dict[str, Any]
    """Arguments by the parameters' names."""
    error: str = ""
    """Why the text is not a valid call; empty if it is valid."""


class CallFormat(Protocol):
    """Format in which calls and answers are written."""

    stop: tuple[str, ...]
    """Texts that end a turn with a call."""

    def calls(self, text: str) -> list[Call]:
        """Returns the calls in the text of a sampled turn, in order."""
        ...

    def around(self, number: int) -> list[tuple[str, str]]:
        """Returns the markup before and after each of `count` consecutive answers."""
        ...


def call_format(
    format: TagsFormat | HermesFormat, tools: Sequence[Tool], tokenizer: "PreTrainedTokenizerBase"
) -> CallFormat:
    """Returns the format that a spec asks for.

    Raises:
        SpecError: the tokenizer's chat template has no form for tools' answers.
    """
    match format:
        case TagsFormat():
            return _Tags(format, tools)
        case HermesFormat():
            return _Hermes(tools, tokenizer)
        case never:
            assert_never(never)


def answer_ids(
    tokenizer: "PreTrainedTokenizerBase", answer: str, around: tuple[str, str], *, most: int
) -> tuple[int, ...]:
    """Returns the token ids of an answer and its markup. If the answer is too long, its end is cut, but never the
    markup."""
    before, after = (tokenizer.encode(text, add_special_tokens=False) if text else [] for text in around)
    said = plain_ids(tokenizer, answer[: most * _LONGEST_TOKEN])
    return (*before, *said[: max(0, most - len(before) - len(after))], *after)


def around_words(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str]:
    """Returns the text that the chat template writes before and after a user's message that follows a turn of the
    policy.

    Raises:
        SpecError: the tokenizer has no such template.
    """
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _SAID},
        {"role": "user", "content": _TOLD},
    ]
    try:
        text = render(tokenizer, messages, add_generation_prompt=True)
    except TemplateError as error:
        raise _no_conversation(str(error)) from None
    _, _, rest = text.partition(_SAID)
    ended = _behind_end(tokenizer, rest)
    if ended is None or _TOLD not in ended:
        raise _no_conversation("the template does not end a turn with an end token")
    before, _, after = ended.partition(_TOLD)
    return before, after


def _behind_end(tokenizer: "PreTrainedTokenizerBase", rest: str) -> str | None:
    """Returns the text that a template writes after a turn's end token, which may be any end token of the model; None
    if it writes no end token.

    Args:
        rest: the text that the template writes after the words of the turn.
    """
    return next((rest.removeprefix(end) for end in end_texts(tokenizer) if end and rest.startswith(end)), None)


def _no_conversation(why: str) -> SpecError:
    return SpecError(
        Issue(
            "the model's chat template does not support conversations",
            path=("rollout", "rollouter", "words"),
            given=f"the template; {why}"[:300],
            hint='write the text around the user\'s words, such as `words: "\\nUser: {words}\\nAssistant: "`',
        )
    )


class _Tags:
    """Format in which a call ends its turn. A call has one argument, its tool's first parameter, if the tool has
    one."""

    def __init__(self, format: TagsFormat, tools: Sequence[Tool]) -> None:
        self._marks = {tool.type: format.around_call(tool.type) for tool in tools}
        self._parameters = {tool.type: tool.parameters[:1] for tool in tools}
        before, _, after = format.answer.partition("{answer}")
        self._around = before, after
        self.stop = tuple(dict.fromkeys(end for _, end in self._marks.values()))

    def calls(self, text: str) -> list[Call]:
        """Returns the call that the text ends with, if any."""
        ending = [
            (body.rindex(begin), tool, body.rpartition(begin)[2])
            for tool, (begin, end) in self._marks.items()
            for body, closed, after in [text.rpartition(end)]
            if closed and begin in body and not after.strip()
        ]
        if not ending:
            return []
        _, tool, argument = max(ending)  # the mark that begins latest
        return [Call(tool, dict.fromkeys(self._parameters[tool], argument))]

    def around(self, number: int) -> list[tuple[str, str]]:
        """See CallFormat."""
        return [self._around] * number


class _Hermes:
    """Format with JSON in `<tool_call>`, any number of calls in a turn."""

    stop: tuple[str, ...] = ()

    def __init__(self, tools: Sequence[Tool], tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tools: list[Any] = [tool.describe() for tool in tools]
        self._tokenizer = tokenizer
        self._known: dict[int, list[tuple[str, str]]] = {}
        self.around(1)

    def calls(self, text: str) -> list[Call]:
        """See CallFormat."""
        return read_calls(text)

    def around(self, number: int) -> list[tuple[str, str]]:
        """See CallFormat. Returns the template's text after the policy's turn, whose end token the policy has sampled
        itself."""
        if number not in self._known:
            self._known[number] = self._around(number)
        return self._known[number]

    def _around(self, number: int) -> list[tuple[str, str]]:
        asked: list[dict[str, Any]] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        told = [{"role": "tool", "name": "f", "content": f"{_TOLD}{index}"} for index in range(number)]
        try:
            text = render(self._tokenizer, [*asked, *told], tools=self._tools, add_generation_prompt=True)
        except TemplateError as error:
            raise _no_tools(str(error)) from None
        said, _, rest = text.partition(_SAID)
        if (ended := _behind_end(self._tokenizer, rest)) is None:
            raise _no_tools("it does not end a turn with an end token")
        pieces = re.split(rf"{re.escape(_TOLD)}\d+", ended)
        if len(pieces) != number + 1 or not all(tool["function"]["name"] in said for tool in self._tools):
            raise _no_tools("it shows no tools")
        return [(piece if index == 0 else "", pieces[index + 1]) for index, piece in enumerate(pieces[:-1])]


def read_calls(text: str) -> list[Call]:
    """Returns the calls written in the form of Hermes and Qwen models, in order."""
    return [_read(found) for found in _CALL.findall(text)]


def _read(text: str) -> Call:
    """Returns the call in a JSON text."""
    try:
        call = parse_json(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f": {error}" if isinstance(error, ValueError) and not isinstance(error, NotJsonError) else ""
        return Call("", {}, f'a call is JSON with "name" and "arguments"{why}')
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Call(str(name), {}, '"name" is a text and "arguments" an object')
    return Call(name, arguments)


def _no_tools(why: str) -> SpecError:
    return SpecError(
        Issue(
            "the model's chat template does not support tools",
            path=("rollout", "rollouter", "format"),
            given=f"hermes; the template: {why}"[:300],
            allowed="a template that shows `tools` and writes messages of role tool, such as Qwen3's",
            hint="write `format: tags`, and say in the prompt how a tool is called",
        )
    )
