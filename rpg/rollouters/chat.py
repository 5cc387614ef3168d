"""Chat messages from clients of OpenAI's interface, and the tokens that the policy gets for them.

A client sends its whole history with each request. If that history continues an earlier context of the policy, the
tokens stay as they were sampled: no text of the policy is ever tokenised again. Text that clients send is never read as
markup: a tokenizer's special tokens in it are plain characters.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpg.data.chat_template import TemplateError, render
from rpg.data.plain_text import mark, rendered_ids, spelled, unmarked
from rpg.tools.calls import read_calls
from specs.documents.strict_json import parse_json
from specs.errors import Issue, SpecError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
"""Role, content as one text, and those of the keys tool_calls, tool_call_id and name that are present. Arguments of
calls are objects if they are JSON."""
_UNLIKE = {"n": 1, "stop": None, "logprobs": False, "top_logprobs": None}
"""Options that the endpoint does not support -> value that turns the option off."""


class ChatError(Exception):
    """Error for a request that cannot be answered. The client gets its text."""


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    limit: int | None
    """Largest number of tokens that the client wants; None if it sets no limit."""
    stream: bool = False


def read_request(body: Any) -> Request:
    """Returns the request in a JSON body.

    Raises:
        ChatError: the body is not a request, or asks for something that the endpoint does not support.
    """
    if not isinstance(body, Mapping) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ChatError("a request has a list of messages")
    for name, nothing in _UNLIKE.items():
        if body.get(name) not in (nothing, None, []):
            raise ChatError(f"the policy samples one answer, which it ends itself: leave {name} out")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise ChatError("the policy answers in text: leave response_format out")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise ChatError("the policy chooses its tools: tool_choice is auto or none")
    messages = [_message(message) for message in body["messages"]]
    if messages[-1]["role"] == "assistant":
        raise ChatError("the last message is the policy's own: there is nothing to answer")
    tools = [] if body.get("tool_choice") == "none" else list(body.get("tools") or [])
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ChatError(f"max_completion_tokens is a number of tokens, not {limit!r}")
    return Request(messages, tools, limit, bool(body.get("stream")))


def _message(message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatError("a message is an object with a role")
    found: Message = {"role": message["role"], "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found | {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}


def as_clients_send(message: Message) -> Message:
    """Returns a problem's message with only those keys that are read from clients' messages, so that the two can be
    compared."""
    try:
        return _message(message)
    except ChatError:  # its calls have a form that no client sends
        return {"role": message["role"], "content": message["content"]}


def _text(content: Any) -> str:
    match content:
        case None:
            return ""
        case str():
            return unmarked(content)
        case list() if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            return unmarked("".join(part["text"] for part in content))
    raise ChatError("the content of a message is a text, or a list of parts of type text")


def _call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        name, arguments = str(function["name"]), function.get("arguments", "{}")
    except (TypeError, KeyError, AttributeError):
        raise ChatError("a call is an object with a function") from None
    if isinstance(arguments, str):
        with suppress(ValueError):  # arguments as the client wrote them
            arguments = parse_json(arguments)
    return {"id": str(call.get("id", "")), "type": "function", "function": {"name": name, "arguments": arguments}}


def spoken(text: str, number: int, *, calls: bool) -> Message:
    """Returns the policy's message, given its answer to request `number`. `calls`: whether it was shown tools."""
    found = read_calls(text) if calls else []
    if not found or any(call.error for call in found):
        return {"role": "assistant", "content": text}
    content = text[: text.index("<tool_call>")].strip()
    made = [
        {
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": call.tool, "arguments": call.arguments},
        }
        for place, call in enumerate(found)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


class ChatTokens:
    """Converter of messages to tokens, by the model's chat template or a spec's own."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str | None) -> None:
        """Takes the template.

        Raises:
            SpecError: there is no template.
        """
        self.tokenizer, self._template = tokenizer, template
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise SpecError(
                Issue(
                    "the model's tokenizer has no chat template",
                    path=("rollout", "rollouter", "template"),
                    hint="write a Jinja template, as tokenizers have them, or take a model that was tuned for chat",
                )
            )

    def whole(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[int, ...]:
        """Returns the tokens of messages, up to the point at which the policy speaks.

        Raises:
            ChatError: the template does not accept them.
        """
        marked, said = self._marked(messages)
        return tuple(rendered_ids(self.tokenizer, self._render(marked, tools), said))

    def behind(self, messages: Sequence[Message], known: int, tools: Sequence[Any], last: int) -> tuple[int, ...]:
        """Returns the tokens from the end of the policy's text to the point at which it speaks again. They are those of
        the messages after the first `known` ones, the last of which is the policy's.

        Args:
            last: the last token that it sampled. If the template also writes an end token, it is not repeated.
        Raises:
            ChatError: the template does not accept them.
        """
        marked, said = self._marked(messages)
        own = mark(known - 1)
        marked[known - 1] = {"role": "assistant", "content": own}
        _, found, rest = self._render(marked, tools).partition(own)
        if not found:
            raise ChatError("the chat template leaves out the policy's text")
        if last in self.tokenizer.all_special_ids:
            rest = rest.removeprefix(str(self.tokenizer.decode([last])))
        return tuple(rendered_ids(self.tokenizer, rest, said))

    def _render(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        try:
            return render(
                self.tokenizer,
                messages,
                tools=spelled(self.tokenizer, list(tools)) or None,
                chat_template=self._template,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            raise ChatError(f"the chat template does not take these messages: {error}"[:500]) from None

    def _marked(self, messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
        """Returns the messages with marks in place of their contents, and the contents."""
        said = [message["content"] for message in messages]
        marked = [
            spelled(self.tokenizer, {**message, "content": ""}) | {"content": mark(place) if message["content"] else ""}
            for place, message in enumerate(messages)
        ]
        return marked, said


@dataclass(frozen=True, slots=True)
class _Said:
    """The history up to a message of the policy."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    token_ids: tuple[int, ...]


class History:
    """History of one response: the requests of its program and the policy's answers, as messages and as tokens."""

    def __init__(self, chat: ChatTokens, messages: list[Message], prompt_ids: tuple[int, ...]) -> None:
        """Takes the prompt.

        Args:
            messages: the prompt's messages.
            prompt_ids: their tokens.
        """
        self._chat = chat
        self._asked = [_Said(messages, [], prompt_ids)]
        self._said: list[_Said] = []

    def context(self, request: Request) -> tuple[int, ...]:
        """Returns the tokens after which the policy speaks. If the request's messages repeat a known history, the
        history's tokens are reused.

        Raises:
            ChatError: the template does not accept the messages.
        """
        for asked in self._asked:
            if (asked.messages, asked.tools) == (request.messages, request.tools):
                return asked.token_ids
        known = [
            said for said in self._said if said.tools == request.tools and _begins(request.messages, said.messages)
        ]
        if not known:
            return self._chat.whole(request.messages, request.tools)
        said = max(known, key=lambda each: len(each.messages))
        new = self._chat.behind(request.messages, len(said.messages), request.tools, said.token_ids[-1])
        return (*said.token_ids, *new)

    def note(self, request: Request, context: tuple[int, ...], message: Message, sampled: tuple[int, ...]) -> None:
        """Records the policy's answer to a request after a context."""
        self._asked.append(_Said(request.messages, request.tools, context))
        self._said.append(_Said([*request.messages, message], request.tools, (*context, *sampled)))


def _begins(messages: list[Message], history: list[Message]) -> bool:
    return len(messages) > len(history) and messages[: len(history)] == history
