"""Calls in what the policy sampled, and answers as the tokens that it is given.

A format reads calls from the text of a sampled turn, and says what stands around an answer. What a tool said is never
read as markup: a tokenizer's special tokens in it are plain characters.
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
"""Characters. Of a tool's answer no more are tokenized than tokens of that length have: it may be of a mebibyte."""
_SAID, _TOLD = "(what the policy said)", "(what the tool told)"
"""Texts of a made-up conversation, around which a template writes what stands around an answer."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it was read."""

    tool: str
    """Name as the policy wrote it."""
    arguments: dict[str, Any]
    """By the parameters' names."""
    error: str = ""
    """Why it is no call; empty: it is one."""


class CallFormat(Protocol):
    """How calls and answers are written."""

    stop: tuple[str, ...]
    """Texts that end a turn with a call."""

    def calls(self, text: str) -> list[Call]:
        """Calls in the text of a sampled turn, in order."""
        ...

    def around(self, number: int) -> list[tuple[str, str]]:
        """Markup before and after each of so many answers, which follow one another."""
        ...


def call_format(
    format: TagsFormat | HermesFormat, tools: Sequence[Tool], tokenizer: "PreTrainedTokenizerBase"
) -> CallFormat:
    """The format that a spec asks for.

    Raises:
        SpecError: the tokenizer's chat template writes no answers of tools.
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
    """Token ids of an answer and its markup. Of an answer that is too long the end is left out, never the markup."""
    before, after = (tokenizer.encode(text, add_special_tokens=False) if text else [] for text in around)
    said = plain_ids(tokenizer, answer[: most * _LONGEST_TOKEN])
    return (*before, *said[: max(0, most - len(before) - len(after))], *after)


def around_words(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str]:
    """Text that the chat template writes before and after what a user says to the policy, whose turn has ended.

    Raises:
        SpecError: there is no such template.
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
    """Returns what a template writes behind the end of a turn, which may be any end token of the model; None where it
    writes no such token.

    Args:
        rest: what it writes behind the words of the turn.
    """
    return next((rest.removeprefix(end) for end in end_texts(tokenizer) if end and rest.startswith(end)), None)


def _no_conversation(why: str) -> SpecError:
    return SpecError(
        Issue(
            "the model's chat template is none for conversations",
            path=("rollout", "rollouter", "words"),
            given=f"the template; {why}"[:300],
            hint='write what stands around the user\'s words, such as `words: "\\nUser: {words}\\nAssistant: "`',
        )
    )


class _Tags:
    """A call ends its turn. It has one argument, its tool's first parameter, if there is one."""

    def __init__(self, format: TagsFormat, tools: Sequence[Tool]) -> None:
        self._marks = {tool.type: format.around_call(tool.type) for tool in tools}
        self._parameters = {tool.type: tool.parameters[:1] for tool in tools}
        before, _, after = format.answer.partition("{answer}")
        self._around = before, after
        self.stop = tuple(dict.fromkeys(end for _, end in self._marks.values()))

    def calls(self, text: str) -> list[Call]:
        """The call that the text ends with, if it does."""
        ending = [
            (body.rindex(begin), tool, body.rpartition(begin)[2])
            for tool, (begin, end) in self._marks.items()
            for body, closed, after in [text.rpartition(end)]
            if closed and begin in body and not after.strip()
        ]
        if not ending:
            return []
        _, tool, argument = max(ending)  # the mark that begins last
        return [Call(tool, dict.fromkeys(self._parameters[tool], argument))]

    def around(self, number: int) -> list[tuple[str, str]]:
        """See CallFormat."""
        return [self._around] * number


class _Hermes:
    """JSON in <tool_call>, any number of calls in a turn."""

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
        """See CallFormat. What the template writes after the policy's turn, whose end token it has sampled itself."""
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
    """Calls as Hermes and Qwen models write them, in order."""
    return [_read(found) for found in _CALL.findall(text)]


def _read(text: str) -> Call:
    """A call from its JSON."""
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
            "the model's chat template is none for tools",
            path=("rollout", "rollouter", "format"),
            given=f"hermes; the template: {why}"[:300],
            allowed="a template that shows `tools` and writes messages of role tool, such as Qwen3's",
            hint="write `format: tags`, and say in the prompt how a tool is called",
        )
    )
