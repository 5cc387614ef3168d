"""Environments in which the policy and a counterpart take turns. The counterpart's words are given tokens: context that
is not trained on. Turns of different responses are sampled together, so that a slow answer delays only its own
response."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from rpg.rollouters.journal import Answer, Kept
from rpg.rollouters.rollouter import Rollouter, SeededPrompt
from rpg.types import Admit, FinishReason, OnResponse, Pause, Rollout, RolloutGroup, Sampling, Turn, TurnRequest
from specs.errors import Issue, SpecError
from specs.schema.base import addition

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rpg.samplers.base import Sampler


class Conversation:
    """One unfinished response."""

    def __init__(self, prompt: SeededPrompt, member: int) -> None:
        self.prompt, self.member = prompt, member
        self.turns: list[Turn] = []
        self.sampled_turns = 0
        self.held: dict[str, Any] = {}
        """State of the response that the environment keeps from turn to turn, under names that it chooses."""
        self.limit: int | None = None
        """Largest number of tokens of the policy's next turn; None if only the remaining room limits it."""
        self.cut = False
        """Whether the last turn of the policy was cut, or a further requested turn had no room."""
        self.answer: str | None = None
        """See Rollout."""

    @property
    def length(self) -> int:
        """Returns the number of tokens so far, without the prompt."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def num_sampled(self) -> int:
        """Returns the number of tokens that the policy has sampled so far."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.sampled)

    @property
    def context(self) -> tuple[int, ...]:
        """Returns the tokens after which the policy's next turn is sampled: all tokens so far, or those since the last
        restart."""
        begins = max((place for place, turn in enumerate(self.turns) if turn.restart), default=None)
        prompt = self.prompt.token_ids if begins is None else ()
        return (*prompt, *(token for turn in self.turns[begins:] for token in turn.token_ids))

    @property
    def seed(self) -> int:
        """Returns the seed of the next turn."""
        return self.prompt.seed_of_turn(self.member, self.sampled_turns)


@dataclass(frozen=True, slots=True)
class Question:
    """A request to the environment in one of the policy's turns."""

    answer: Callable[[], list[Answer]]
    """Function that returns the answers. An empty list ends the response without further text. It is called in a
    separate thread, unless `at_once` is true."""
    late: Callable[[], list[Answer]]
    """Function that returns substitute answers if the real ones are late, and ends the computation of the real ones."""
    remember: Callable[[Sequence[Answer]], None]
    """Function that is called instead of `answer` if an earlier attempt of the run gave the answers."""
    at_once: bool
    """Whether the answers depend only on the turns before them and take microseconds."""
    seconds: float
    """Longest time in seconds that the answers may take after the request; infinite if they have their own time
    limit."""


class Counterpart(ABC):
    """Partner that takes turns with the policy."""

    stop: tuple[str, ...] = ()
    """Texts that end a turn of the policy, if sampled."""
    hears_all: ClassVar[bool] = False
    """Whether the counterpart gets every turn of the policy, including a turn that was cut and the last allowed one."""

    def opening(self, conversation: Conversation) -> Question | None:  # noqa: ARG002 (for those that override it)
        """Returns the question that is asked before the policy's first turn; None if the policy begins."""
        return None

    @abstractmethod
    def asked(self, conversation: Conversation, text: str) -> Question | None:
        """Returns the question in the policy's last turn, given the turn's text; None if the turn has none and the
        response ends."""

    @abstractmethod
    def turns(self, conversation: Conversation, answers: Sequence[Answer]) -> list[Turn] | None:
        """Returns the answers as given turns; None ends the response."""

    @abstractmethod
    def close(self, conversation: Conversation) -> None:
        """Releases the resources of a conversation that has ended."""

    def leave(self) -> None:  # noqa: B027 (most hold nothing)
        """Releases the resources of all conversations after the last one."""


class TakingTurns(Rollouter):
    """Base class of environments that only define who takes turns with the policy. This class manages the turns."""

    max_turns: int = Field(4, ge=2)
    """Largest number of turns of the policy in a response. The last one is not answered."""
    turn_tokens: int | None = Field(None, ge=1)
    """Largest number of tokens of one turn of the policy. If left out, the rest of the response's tokens."""
    sampled_tokens: int | None = addition(None, ge=1)
    """Largest number of tokens of all turns of the policy in a response. If left out, the rest of the response's
    tokens."""

    @property
    @abstractmethod
    def asked_at_once(self) -> int:
        """Returns the number of answers that a rank computes at once."""

    @property
    def answers_in_step(self) -> bool:
        """Returns whether the sampler waits at each of its pauses for all answers in progress."""
        return False

    @property
    def rewards_turns(self) -> bool:
        """See RollouterSection."""
        return False

    @abstractmethod
    def counterpart(self, tokenizer: "PreTrainedTokenizerBase") -> Counterpart:
        """Returns the counterpart for a policy with this tokenizer."""

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

        with Conversations(self, prompts, tokenizer, group_size, sampling, ended) as conversations:
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
        """See Rollouter. Prompts begin while others are still sampled."""
        with Conversations(self, prompts, tokenizer, group_size, sampling, on_response) as conversations:
            return conversations.sample(sampler, admit)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A question that is being answered."""

    index: int
    """Index of its response."""
    question: Question
    until: float
    """Time at which it is given up, on the monotonic clock."""


class Conversations:
    """The responses of one call, each of which is being sampled, waits for an answer, or has ended."""

    def __init__(
        self,
        options: TakingTurns,
        prompts: Sequence[SeededPrompt],
        tokenizer: "PreTrainedTokenizerBase",
        group_size: int,
        sampling: Sampling,
        on_response: OnResponse,
    ) -> None:
        self._options, self._tokenizer, self._on_response = options, tokenizer, on_response
        self._other = options.counterpart(tokenizer)
        self._sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *self._other.stop))))
        self._room = sampling.max_response_length
        self._all = [Conversation(prompt, member) for prompt in prompts for member in range(group_size)]
        self._group_size = group_size
        self._pool = ThreadPoolExecutor(max(1, min(options.asked_at_once, len(self._all))), "answers")
        self._begun = 0
        self._asked: list[int] = []
        """Response of each turn that was requested from the sampler."""
        self._ready: list[int] = []
        """Responses whose next turn can begin."""
        self._pending: dict[Future[list[Answer]], _Pending] = {}
        self._recalled: dict[int, Kept] = {}
        """Response -> answers of an earlier attempt. They are given in the same pause as then."""
        self._pauses = 0
        """Number of the sampler's pauses so far."""
        self._open: set[int] = set()
        """Responses that have not ended."""

    def sample(self, sampler: "Sampler", admit: Admit | None = None) -> int:
        """Samples all responses or, until `admit` ends the call, those that it allows; see Rollouter.stream."""
        if not admit and not self._all:
            return 0

        def next_turns(pause: Pause) -> list[TurnRequest] | None:
            return self._next_turns(pause, admit)

        unfinished = sampler.serve(next_turns, sampling=self._sampling, on_response=self._turn_ended)
        return unfinished + sum(self._all[index].num_sampled for index in self._open)

    def _next_turns(self, pause: Pause, admit: Admit | None) -> list[TurnRequest] | None:
        idle = pause == "idle"
        self._pauses += 1
        if idle and not self._ready and self._pending and not self._recalled:
            until = min(each.until for each in self._pending.values())
            seconds = None if until == math.inf else max(0.0, until - time.monotonic())
            wait(self._pending, timeout=seconds, return_when=FIRST_COMPLETED)
        if self._options.answers_in_step:
            wait(self._pending)
        self._take_answers()
        nothing_to_do = idle and not self._ready and not self._pending and not self._recalled
        if admit is None:
            if self._begun < len(self._all):
                self._begin(len(self._all))
            elif nothing_to_do:
                return None
        elif nothing_to_do or pause == "steps":
            while (admitted := admit()) is not None:
                self._begin(admitted * self._group_size)
                if self._ready or self._pending or self._recalled or not idle:
                    break
            if admitted is None:
                return None
        ready, self._ready = sorted(self._ready), []
        self._asked += ready
        return [self._request(index) for index in ready]

    def _begin(self, count: int) -> None:
        new = range(self._begun, max(count, self._begun))
        self._open |= set(new)
        self._begun = new.stop
        for index in new:
            if question := self._other.opening(self._all[index]):
                self._ask(index, question)
            else:
                self._ready.append(index)

    def _request(self, index: int) -> TurnRequest:
        conversation = self._all[index]
        prompt = index // self._group_size
        return TurnRequest(conversation.context, conversation.seed, self._left(conversation), prompt)

    def _left(self, conversation: Conversation) -> int:
        """Returns how many tokens the policy's next turn may have; below 1 if the response is over."""
        left = self._room - conversation.length
        if self._options.sampled_tokens is not None:
            left = min(left, self._options.sampled_tokens - conversation.num_sampled)
        return min(left, self._options.turn_tokens or left, conversation.limit or left)

    def _turn_ended(self, number: int, sampled: Rollout) -> None:
        index = self._asked[number]
        conversation = self._all[index]
        (turn,) = sampled.turns
        rewarded = replace(turn, reward=0.0) if self._options.rewards_turns else turn
        conversation.turns.append(rewarded)
        conversation.sampled_turns += 1
        conversation.cut = sampled.finish_reason == "length"
        text = str(self._tokenizer.decode(list(turn.token_ids), skip_special_tokens=True))
        hears_all = self._other.hears_all
        question = self._other.asked(conversation, text) if hears_all or not conversation.cut else None
        if question is None:
            self._end(index, sampled.finish_reason)
        elif conversation.sampled_turns == self._options.max_turns and not hears_all:
            self._end(index, "length")
        elif question.at_once:
            self._give(index, question.answer())
        else:
            self._ask(index, question)

    def _ask(self, index: int, question: Question) -> None:
        """Starts to answer a question while sampling continues, unless an earlier attempt of the run has the
        answers."""
        conversation = self._all[index]
        journal = conversation.prompt.journal
        known = journal.recall(conversation.member, conversation.sampled_turns, conversation.context)
        if known is not None:
            question.remember(known.answers)
            self._recalled[index] = known
        else:
            until = time.monotonic() + question.seconds
            self._pending[self._pool.submit(question.answer)] = _Pending(index, question, until)

    def _take_answers(self) -> None:
        """Gives the finished answers to their responses, in order, once all of them are in the journal."""
        answers: dict[int, Sequence[Answer]] = {}
        for future, pending in list(self._pending.items()):
            if future.done():
                answers[pending.index] = future.result()
            elif time.monotonic() >= pending.until:
                future.cancel()
                answers[pending.index] = pending.question.late()
            else:
                continue
            del self._pending[future]
        for index, kept in list(self._recalled.items()):
            if kept.pause <= self._pauses:
                answers[index] = self._recalled.pop(index).answers
        for index, said in answers.items():
            conversation, kept = self._all[index], Kept(tuple(said), self._pauses)
            conversation.prompt.journal.keep(
                conversation.member, conversation.sampled_turns, conversation.context, kept
            )
        if answers:
            self._all[next(iter(answers))].prompt.journal.sync()
        for index in sorted(answers):
            self._give(index, answers[index])

    def _give(self, index: int, answers: Sequence[Answer]) -> None:
        """Gives the answers to a turn. Ends the response if there are no answers, or no room for another turn."""
        conversation = self._all[index]
        if self._options.rewards_turns:
            conversation.turns[-1] = replace(conversation.turns[-1], reward=sum(each.reward for each in answers))
        given = self._other.turns(conversation, answers) if answers else None
        if given is None:
            self._end(index, "length" if conversation.cut else "stop")
            return
        before = len(conversation.turns)
        conversation.turns += given
        if self._left(conversation) < 1:
            if not conversation.sampled_turns:
                raise SpecError(_no_room(conversation, self._room))
            del conversation.turns[before:]
            self._end(index, "length")
        else:
            self._ready.append(index)

    def _end(self, index: int, reason: FinishReason) -> None:
        conversation = self._all[index]
        self._other.close(conversation)
        self._open.discard(index)
        self._on_response(index, Rollout(tuple(conversation.turns), reason, conversation.answer))

    def __enter__(self) -> "Conversations":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends everything that is still running."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for future, pending in self._pending.items():
            if not future.done():
                pending.question.late()
        for index in self._open:
            self._other.close(self._all[index])
        self._other.leave()


def _no_room(conversation: Conversation, room: int) -> Issue:
    return Issue(
        "the text before the policy's first turn leaves the policy no room",
        ("rollout", "max_response_length"),
        given=f"{room}; {conversation.length} tokens are given",
        allowed=f"at least {conversation.length + 1}: it includes given tokens",
    )
