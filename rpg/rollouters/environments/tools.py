"""The environment of tools: the policy calls, the tool answers, and the context grows."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, assert_never

from pydantic import Field

from rpg.rollouters.rollouter import Rollouter, SeededPrompt
from rpg.tools.calls import Call, CallFormat, answer_ids, call_format
from rpg.tools.tool import Tool, ToolError, ToolSession
from rpg.types import Admit, OnResponse, Pause, Rollout, RolloutGroup, Sampling, Turn, TurnRequest
from specs.errors import Issue
from specs.schema.base import execution
from specs.schema.rollout import Format, HermesFormat, NamedTool, TagsFormat, TurnBounds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rpg.samplers.base import Sampler


class Tools(Rollouter):
    """The policy may call tools. Answers are given tokens: context, which nothing trains on. A turn of one response is
    sampled beside any turn of another; a slow tool keeps none but its own response waiting."""

    tools: tuple[NamedTool, ...] = Field(min_length=1)
    """The tools, by name or with their options."""
    format: Format = TagsFormat()
    """How calls and answers are written: tags or hermes."""
    max_turns: int = Field(4, ge=2)
    """Turns of the policy in a response at most. A call in the last one is not answered."""
    turn_tokens: int | None = Field(None, ge=1)
    """Tokens of one turn of the policy at most; left out: those that the response has left."""
    answer_tokens: int = Field(256, ge=1)
    """Tokens of one answer at most, with what stands around it. The end of a longer answer is left out."""
    calls: int = Field(16, ge=1)
    """Calls in a response at most. Those beyond it are answered by an error."""
    call_seconds: float = Field(30.0, gt=0)
    """Seconds of a call at most, from when it is made; one that takes longer is answered by an error."""
    calls_at_once: int = execution(32, ge=1)
    """Calls under way at once on a rank."""

    @property
    def shown_tools(self) -> tuple[dict[str, Any], ...]:
        """See RollouterSection."""
        match self.format:
            case TagsFormat():
                return ()
            case HermesFormat():
                return tuple(tool.describe() for tool in self.tools)
            case never:
                assert_never(never)

    @property
    def runs_programs(self) -> str:
        """See RollouterSection."""
        return next((tool.type for tool in self.tools if tool.sandboxed), "")

    def bounds(self, max_response_length: int) -> TurnBounds:
        """See RollouterSection. An answer stands between two turns of the policy, of a token each at least; hermes has
        any number of answers there."""
        sampled = min(max_response_length, self.max_turns * (self.turn_tokens or max_response_length))
        given = max(0, max_response_length - 2)
        if isinstance(self.format, TagsFormat):
            given = min(given, (self.max_turns - 1) * self.answer_tokens)
        length = min(max_response_length, sampled + given)
        return TurnBounds(self.max_turns, sampled, given, length, (self.max_turns - 1) * self.call_seconds)

    def issues(self, max_response_length: int) -> Iterator[Issue]:
        """See RollouterSection."""
        names = [tool.type for tool in self.tools]
        for place, name in enumerate(names):
            if name in names[:place]:
                yield Issue("a tool is named twice", ("tools", place), given=name)
        if self.answer_tokens + 2 > max_response_length:
            yield Issue(
                "a call, its answer and another turn do not fit into a response",
                ("answer_tokens",),
                given=str(self.answer_tokens),
                allowed=f"at most {max_response_length - 2}: rollout.max_response_length counts what tools say",
                hint="raise rollout.max_response_length, or lower answer_tokens",
            )
        if isinstance(self.format, TagsFormat) and "{tool}" not in self.format.call and len(names) > 1:
            yield Issue(
                "a call does not say of which tool it is",
                ("format", "call"),
                given=self.format.call,
                hint="write {tool} where the tool's name stands",
            )

    def generate(
        self,
        prompts: Sequence[SeededPrompt],
        sampler: "Sampler",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        group_size: int,
        sampling: Sampling,
        on_response: OnResponse | None = None,
    ) -> list[RolloutGroup]:
        """See Rollouter."""
        rollouts: dict[int, Rollout] = {}

        def ended(index: int, rollout: Rollout) -> None:
            rollouts[index] = rollout
            if on_response:
                on_response(index, rollout)

        with _Conversations(self, prompts, tokenizer, group_size, sampling, ended) as conversations:
            conversations.sample(sampler)
        return [
            RolloutGroup(
                prompt.token_ids,
                tuple(rollouts[number * group_size + member] for member in range(group_size)),
                sampler.policy_version,
            )
            for number, prompt in enumerate(prompts)
        ]

    def stream(
        self,
        prompts: Sequence[SeededPrompt],
        sampler: "Sampler",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        group_size: int,
        sampling: Sampling,
        admit: Admit,
        on_response: OnResponse,
    ) -> int:
        """See Rollouter. A prompt begins while others are under way."""
        with _Conversations(self, prompts, tokenizer, group_size, sampling, on_response) as conversations:
            return conversations.sample(sampler, admit)


class _Conversation:
    """One response under way."""

    def __init__(self, prompt: SeededPrompt, member: int) -> None:
        self.prompt, self.member = prompt, member
        self.turns: list[Turn] = []
        self.sampled_turns = self.calls = 0
        self.sessions: dict[str, ToolSession] = {}

    @property
    def length(self) -> int:
        """Tokens so far, the prompt not counted."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens so far."""
        return (*self.prompt.token_ids, *(token for turn in self.turns for token in turn.token_ids))

    def close(self) -> None:
        """Ends the sessions of its tools."""
        for session in self.sessions.values():
            session.close()
        self.sessions.clear()


@dataclass(frozen=True, slots=True)
class _Pending:
    """Calls of a turn that are being answered."""

    index: int
    """Response that they are of."""
    calls: Sequence[Call]
    until: float
    """When they are given up, on the monotonic clock."""


def _close(conversation: _Conversation, _: Future[list["Answer"]]) -> None:
    conversation.close()


Answer = tuple[str, str, str, float]
"""Tool, text, error (empty: none) and seconds."""


class _Conversations:
    """The responses of one call: which of them are sampled, wait for a tool, or have ended."""

    def __init__(
        self,
        options: Tools,
        prompts: Sequence[SeededPrompt],
        tokenizer: "PreTrainedTokenizerBase",
        group_size: int,
        sampling: Sampling,
        on_response: OnResponse,
    ) -> None:
        self._options, self._tokenizer, self._on_response = options, tokenizer, on_response
        self._tools: dict[str, Tool] = {tool.type: tool for tool in options.tools if isinstance(tool, Tool)}
        self._format: CallFormat = call_format(options.format, tuple(self._tools.values()), tokenizer)
        stop = tuple(dict.fromkeys((*sampling.stop, *self._format.stop)))
        self._sampling = replace(sampling, stop=stop)
        self._room = sampling.max_response_length
        self._all = [_Conversation(prompt, member) for prompt in prompts for member in range(group_size)]
        self._group_size = group_size
        self._pool = ThreadPoolExecutor(options.calls_at_once, "tools")
        self._begun = 0
        self._asked: list[int] = []
        """Response that each turn asked of the sampler belongs to."""
        self._ready: list[int] = []
        """Responses whose next turn can begin."""
        self._pending: dict[Future[list[Answer]], _Pending] = {}
        self._open: set[int] = set()
        """Responses that are under way."""

    def sample(self, sampler: "Sampler", admit: Admit | None = None) -> int:
        """Samples all responses, or those that `admit` allows until it ends the call; see Rollouter.stream."""
        if not admit and not self._all:
            return 0

        def next_turns(pause: Pause) -> list[TurnRequest] | None:
            return self._next_turns(pause, admit)

        unfinished = sampler.serve(next_turns, sampling=self._sampling, on_response=self._turn_ended)
        left = (turn for index in self._open for turn in self._all[index].turns if turn.sampled)
        return unfinished + sum(len(turn.token_ids) for turn in left)

    def _next_turns(self, pause: Pause, admit: Admit | None) -> list[TurnRequest] | None:
        idle = pause == "idle"
        if idle and not self._ready and self._pending:
            until = min(each.until for each in self._pending.values())
            wait(self._pending, timeout=max(0.0, until - time.monotonic()), return_when=FIRST_COMPLETED)
        self._take_answers()
        nothing_to_do = idle and not self._ready and not self._pending
        if admit is None:
            if self._begun < len(self._all):
                self._begin(len(self._all))
            elif nothing_to_do:
                return None
        elif nothing_to_do or pause == "steps":
            while (admitted := admit()) is not None:
                self._begin(admitted * self._group_size)
                if self._ready or self._pending or not idle:
                    break
            if admitted is None:
                return None
        ready, self._ready = sorted(self._ready), []
        self._asked += ready
        return [self._request(index) for index in ready]

    def _begin(self, count: int) -> None:
        new = range(self._begun, max(count, self._begun))
        self._ready += new
        self._open |= set(new)
        self._begun = new.stop

    def _request(self, index: int) -> TurnRequest:
        conversation = self._all[index]
        room = self._room - conversation.length
        seed = conversation.prompt.seed_of_turn(conversation.member, conversation.sampled_turns)
        return TurnRequest(conversation.context, seed, min(room, self._options.turn_tokens or room))

    def _turn_ended(self, number: int, sampled: Rollout) -> None:
        index = self._asked[number]
        conversation = self._all[index]
        (turn,) = sampled.turns
        conversation.turns.append(turn)
        conversation.sampled_turns += 1
        calls = self._calls(turn) if sampled.finish_reason == "stop" else []
        if not calls:
            self._end(index, sampled.finish_reason)
        elif conversation.sampled_turns == self._options.max_turns:
            self._end(index, "length")
        elif all(call.error or self._is_immediate(call) for call in calls):
            self._give(index, self._answers(conversation, calls))
        else:
            until = time.monotonic() + self._options.call_seconds
            self._pending[self._pool.submit(self._answers, conversation, calls)] = _Pending(index, calls, until)

    def _calls(self, turn: Turn) -> list[Call]:
        return self._format.calls(str(self._tokenizer.decode(list(turn.token_ids), skip_special_tokens=True)))

    def _is_immediate(self, call: Call) -> bool:
        return call.tool not in self._tools or self._tools[call.tool].immediate

    def _answers(self, conversation: _Conversation, calls: Sequence[Call]) -> list[Answer]:
        """Answers to the calls of a turn, one after another."""
        answers = []
        for call in calls:
            begun = time.monotonic()
            text, error = self._answer(conversation, call)
            answers.append((call.tool, text, error, time.monotonic() - begun))
        return answers

    def _answer(self, conversation: _Conversation, call: Call) -> tuple[str, str]:
        conversation.calls += 1
        if call.error:
            return "", call.error
        if conversation.calls > self._options.calls:
            return "", f"no more than {self._options.calls} calls"
        if call.tool not in self._tools:
            return "", f"there is no tool {call.tool[:80]!r}; there are {', '.join(self._tools)}"
        if call.tool not in conversation.sessions:
            conversation.sessions[call.tool] = self._tools[call.tool].open()
        try:
            return conversation.sessions[call.tool].call(call.arguments), ""
        except ToolError as error:
            return "", str(error)

    def _take_answers(self) -> None:
        """Gives the answers that are there, in the order of the responses."""
        for future, pending in sorted(self._pending.items(), key=lambda item: item[1].index):
            if future.done():
                del self._pending[future]
                self._give(pending.index, future.result())
            elif time.monotonic() >= pending.until:
                del self._pending[future]
                self._all[pending.index].sessions = {}  # a call is under way in one: it is left to itself
                late = f"no answer within {self._options.call_seconds:g} s"
                self._give(pending.index, [(call.tool, "", late, self._options.call_seconds) for call in pending.calls])

    def _give(self, index: int, answers: Sequence[Answer]) -> None:
        """Gives the answers to the calls of a turn; ends the response where they leave no room for another turn."""
        conversation = self._all[index]
        given = [
            Turn(
                answer_ids(
                    self._tokenizer, f"error: {error}" if error else text, around, most=self._options.answer_tokens
                ),
                tool=tool,
                error=error,
                seconds=seconds,
            )
            for (tool, text, error, seconds), around in zip(answers, self._format.around(len(answers)), strict=True)
        ]
        if conversation.length + sum(len(turn.token_ids) for turn in given) >= self._room:
            self._end(index, "length")
            return
        conversation.turns += given
        self._ready.append(index)

    def _end(self, index: int, reason: Literal["stop", "length"]) -> None:
        conversation = self._all[index]
        conversation.close()
        self._open.discard(index)
        self._on_response(index, Rollout(tuple(conversation.turns), reason))

    def __enter__(self) -> "_Conversations":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what is under way. A call that goes on ends its tool's session when it has ended."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for future, pending in self._pending.items():
            future.add_done_callback(partial(_close, self._all[pending.index]))
        waiting = {pending.index for pending in self._pending.values()}
        for index, conversation in enumerate(self._all):
            if index not in waiting:
                conversation.close()
