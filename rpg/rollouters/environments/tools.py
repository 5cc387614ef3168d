"""The environment of tools: the policy calls a tool, the tool answers, and the context grows."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, assert_never

from pydantic import Field

from rpg.rollouters.journal import Answer
from rpg.rollouters.taking_turns import Conversation, Counterpart, Question, TakingTurns
from rpg.tools.calls import Call, answer_ids, call_format
from rpg.tools.tool import EndingSession, Tool, ToolSession
from rpg.tools.tool_error import ToolError
from rpg.types import Turn
from specs.errors import Issue, IssueError, SpecError
from specs.schema.base import addition, execution
from specs.schema.rollout import Answering, CallRewards, Format, HermesFormat, NamedTool, TagsFormat, TurnBounds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tools(TakingTurns):
    """Turns with tools that the policy may call. Answers are context and are not trained on. Turns of different
    responses are sampled together; a slow tool delays only its own response."""

    tools: tuple[NamedTool, ...] = Field(min_length=1)
    """The tools, by name or with their options."""
    format: Format = TagsFormat()
    """Format of calls and answers: tags or hermes."""
    answer_tokens: int = Field(256, ge=1)
    """Largest number of tokens of one answer, including the text around it. A longer answer is cut off."""
    calls: int = Field(16, ge=1)
    """Largest number of calls in a response. Further calls are answered with an error."""
    call_seconds: float = Field(30.0, gt=0)
    """Longest time in seconds of a turn's calls, from their start. Calls that take longer are ended and answered with
    an error."""
    seconds: float | None = addition(None, gt=0)
    """Longest time in seconds of all calls of a response together; further calls are answered with an error. If left
    out, there is no limit. The machine's speed decides which calls exceed it: a killed run continues unchanged, since
    answers are stored, but another run may differ."""
    rewards: CallRewards = addition(CallRewards())
    """Rewards of a turn for its calls, in addition to the reward of the response."""
    calls_at_once: int = execution(32, ge=1)
    """Largest number of concurrent calls on a rank."""

    @property
    def asked_at_once(self) -> int:
        """See TakingTurns."""
        return self.calls_at_once

    @property
    def rewards_turns(self) -> bool:
        """See RollouterSection."""
        return self.rewards != CallRewards()

    @property
    def shown_tools(self) -> tuple[dict[str, Any], ...]:
        """See RollouterSection."""
        match self.format:
            case TagsFormat():
                return ()
            case HermesFormat():
                return tuple(tool.describe() for tool in self.offered)
            case never:
                assert_never(never)

    @property
    def offered(self) -> tuple[Tool, ...]:
        """Returns the tools that the policy may call, including those of servers.

        Raises:
            SpecError: a server has no tools, or two tools have the same name.
        """
        path = ("rollout", "rollouter", "tools")
        found: dict[str, Tool] = {}
        for place, section in enumerate(self.tools):
            assert isinstance(section, Tool)
            try:
                offered = section.offered()
            except IssueError as error:
                raise SpecError(replace(error.issue, path=(*path, place, *error.issue.path))) from None
            for tool in offered:
                if tool.type in found:
                    raise SpecError(Issue("two tools have one name", (*path, place), given=tool.type))
                found[tool.type] = tool
        return tuple(found.values())

    @property
    def runs_programs(self) -> str:
        """See RollouterSection."""
        return next((tool.type for tool in self.tools if tool.sandboxed), "")

    def lacks(self) -> Issue | None:
        """See RollouterSection."""
        found = ((place, tool.lacks()) for place, tool in enumerate(self.tools))
        return next((replace(issue, path=("tools", place, *issue.path)) for place, issue in found if issue), None)

    def answering(self, seconds: float) -> Iterator[Answering]:  # noqa: ARG002 (a server has a time of its own to start in)
        """See RollouterSection. A tool passes if it returns its description. Servers are started for this."""
        for section in self.tools:
            assert isinstance(section, Tool)
            trouble = section.lacks()
            try:
                for tool in () if trouble else section.offered():
                    tool.describe()
            except IssueError as error:
                trouble = error.issue
            why = ": ".join(filter(None, (trouble.message, trouble.given))) if trouble else ""
            yield Answering("tool", section.type, why)

    def bounds(self, max_response_length: int) -> TurnBounds:
        """See RollouterSection. An answer of at least one token comes between two turns of the policy; hermes allows
        any number of answers there."""
        turns = min(max_response_length, self.max_turns * (self.turn_tokens or max_response_length))
        sampled = min(turns, self.sampled_tokens or turns)
        given = max(0, max_response_length - 2)
        if isinstance(self.format, TagsFormat):
            given = min(given, (self.max_turns - 1) * self.answer_tokens)
        length = min(max_response_length, sampled + given)
        seconds = (self.max_turns - 1) * self.call_seconds
        return TurnBounds(self.max_turns, sampled, given, length, min(seconds, self.seconds or seconds))

    def issues(self, max_response_length: int) -> Iterator[Issue]:
        """See RollouterSection."""
        yield from super().issues(max_response_length)
        names = [tool.type for tool in self.tools]
        for place, name in enumerate(names):
            if name in names[:place] and not self.tools[place].several:
                yield Issue("a tool is named twice", ("tools", place), given=name)
        if self.answer_tokens + 2 > max_response_length:
            yield Issue(
                "a call, its answer and another turn do not fit into a response",
                ("answer_tokens",),
                given=str(self.answer_tokens),
                allowed=f"at most {max_response_length - 2}: rollout.max_response_length counts what tools say",
                hint="raise rollout.max_response_length, or lower answer_tokens",
            )
        if (
            isinstance(self.format, TagsFormat)
            and "{tool}" not in self.format.call
            and (len(names) > 1 or self.tools[0].several)
        ):
            yield Issue(
                "a call does not name its tool",
                ("format", "call"),
                given=self.format.call,
                hint="write {tool} in place of the tool's name",
            )

    def counterpart(self, tokenizer: "PreTrainedTokenizerBase") -> Counterpart:
        """See TakingTurns."""
        return _Answering(self, tokenizer)


def _close(sessions: dict[str, ToolSession]) -> None:
    """Ends the sessions of tools."""
    for session in sessions.values():
        session.close()
    sessions.clear()


class _Held:
    """State of a response's calls that is kept from turn to turn."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.sessions: dict[str, ToolSession] = {}
        self.said_before: list[Call] = []
        """Calls that an earlier attempt of the run made and that tools with a state have not received in this
        attempt."""


class _Answering(Counterpart):
    """Counterpart that answers calls with the tools."""

    def __init__(self, options: Tools, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.options, self._tokenizer = options, tokenizer
        self.tools: dict[str, Tool] = {tool.type: tool for tool in options.offered}
        self._format = call_format(options.format, tuple(self.tools.values()), tokenizer)
        self.stop = self._format.stop

    def asked(self, conversation: Conversation, text: str) -> Question | None:
        """See Counterpart."""
        if not (calls := self._format.calls(text)):
            return None
        held: _Held = conversation.held.setdefault("calls", _Held())
        seconds, left = self.options.call_seconds, float("inf")
        if self.options.seconds is not None:
            left = self.options.seconds - held.seconds
        refusals = [self._refusal(call, held.calls + place, left) for place, call in enumerate(calls)]
        held.calls += len(calls)
        exchange = _Exchange(self, held, calls, refusals, min(seconds, left))
        at_once = all(why or self.tools[call.tool].immediate for call, why in zip(calls, refusals, strict=True))
        return Question(exchange.answer, exchange.late, exchange.remember, at_once, exchange.seconds)

    def _refusal(self, call: Call, earlier: int, seconds: float) -> str:
        """Returns why a call, after this many others, is not made; empty if it is made."""
        if call.error:
            return call.error
        if earlier >= self.options.calls:
            return f"no more than {self.options.calls} calls"
        if seconds <= 0:
            return f"no more than {self.options.seconds:g} s of calls"
        if call.tool not in self.tools:
            return f"there is no tool {call.tool[:80]!r}; there are {', '.join(self.tools)}"
        return ""

    def turns(self, conversation: Conversation, answers: Sequence[Answer]) -> list[Turn]:
        """See Counterpart."""
        held: _Held = conversation.held["calls"]
        held.seconds += sum(answer.seconds for answer in answers)
        most = self.options.answer_tokens
        return [
            Turn(
                answer_ids(self._tokenizer, f"error: {said.error}" if said.error else said.text, around, most=most),
                tool=said.tool,
                error=said.error,
                seconds=said.seconds,
            )
            for said, around in zip(answers, self._format.around(len(answers)), strict=True)
        ]

    def close(self, conversation: Conversation) -> None:
        """See Counterpart."""
        if "calls" in conversation.held:
            _close(conversation.held.pop("calls").sessions)

    def leave(self) -> None:
        """See Counterpart. There is nothing to end."""


class _Exchange:
    """The calls of a turn, and their answers."""

    def __init__(
        self, answering: _Answering, held: _Held, calls: Sequence[Call], refusals: Sequence[str], seconds: float
    ) -> None:
        self._tools, self._rewards, self._held = answering.tools, answering.options.rewards, held
        self._calls, self._refusals, self.seconds = calls, refusals, seconds
        self._sessions = held.sessions
        self._lock = threading.Lock()
        self._given_up = self._under_way = False

    def answer(self) -> list[Answer]:
        """Makes the calls one after another and returns their answers. If the calls are given up before they end,
        closes the sessions."""
        with self._lock:
            self._under_way = True
        answers = []
        for call, refusal in zip(self._calls, self._refusals, strict=True):
            begun = time.monotonic()
            text, error = ("", refusal) if refusal else self._called(call)
            answers.append(self._said(call, text, error, time.monotonic() - begun))
        with self._lock:
            self._under_way = False
            if self._given_up:
                _close(self._sessions)
        return answers

    def late(self) -> list[Answer]:
        """Gives up the calls, and ends the one in progress."""
        with self._lock:
            self._given_up = True
            self._held.sessions = {}
            for session in self._sessions.values() if self._under_way else ():
                if isinstance(session, EndingSession):
                    session.end()
            if not self._under_way:
                _close(self._sessions)
        return [self._said(call, "", f"no answer within {self.seconds:g} s", self.seconds) for call in self._calls]

    def remember(self, answers: Sequence[Answer]) -> None:
        """Records the calls that were made before. Tools with a state restore it from them."""
        made = zip(self._calls, self._refusals, answers, strict=True)
        self._held.said_before += [call for call, refusal, _ in made if not refusal and self._tools[call.tool].stateful]

    def _said(self, call: Call, text: str, error: str, seconds: float) -> Answer:
        return Answer(call.tool, text, error, seconds, self._rewards.error if error else self._rewards.call)

    def _called(self, call: Call) -> tuple[str, str]:
        """Makes a call. Returns its text and error."""
        try:
            with self._lock:
                if self._given_up:
                    return "", "given up"
                if call.tool not in self._sessions:
                    self._sessions[call.tool] = self._tools[call.tool].open()
                session = self._sessions[call.tool]
            for before in [each for each in self._held.said_before if each.tool == call.tool]:
                self._held.said_before.remove(before)
                with suppress(ToolError):
                    session.call(before.arguments)
            return session.call(call.arguments), ""
        except ToolError as error:
            return "", str(error)
