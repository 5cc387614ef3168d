"""The environment of an agent: a program calls the policy through an OpenAI-compatible endpoint, as often as it
needs."""

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rpg.rollouters.agent import AgentProgram, Running
from rpg.rollouters.chat import ChatError, ChatTokens, History, Request, as_clients_send, spoken
from rpg.rollouters.endpoint import Asked, Ended, Endpoint, Reply, endpoint
from rpg.rollouters.journal import Answer
from rpg.rollouters.taking_turns import Conversation, Counterpart, Question, TakingTurns
from rpg.types import Problem, Turn
from specs.documents.strict_json import half_character
from specs.errors import Issue, SpecError
from specs.schema.base import PathKind, execution
from specs.schema.rollout import Answering, NamedProgram, TurnBounds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Agent(TakingTurns):
    """A program works on each prompt and calls the policy by OpenAI's chat completions, optionally with tools and as a
    stream; each answer is a turn. The program's messages are context and are not trained on. If a request continues the
    conversation, the policy's earlier turns keep their sampled tokens. If the program rewrites its history, later turns
    are trained on after the new context only. The response ends with the program."""

    program: NamedProgram
    """The program, by name or with its options."""
    template: str | None = Field(None, min_length=1)
    """Jinja template for messages, as in tokenizers. If left out, the model's chat template is used. A request with
    exactly the prompt's messages and no tools yields the prompt unchanged."""
    answer: Literal["last_turn", "returned"] = "last_turn"
    """Text to score. last_turn: the policy's last turn. returned: the program's return value, or an empty text if it
    fails."""
    program_seconds: float = Field(300.0, gt=0)
    """Longest time in seconds of the program between an answer and its next request or its end. A slower program is
    ended, and its response with it."""
    in_step: bool = False
    """Whether the sampler waits at each pause until every program has sent a request or ended. The batches then depend
    on the programs' requests and not on their speed, so that two runs of deterministic programs agree in every bit. A
    slow program delays all others, and all programs of a rank start at once. With false, two runs agree in their
    tokens, unless rounding decides one."""
    programs_at_once: int = execution(64, ge=1)
    """Largest number of concurrent programs on a rank, unless `in_step` is true."""

    @property
    def asked_at_once(self) -> int:
        """See TakingTurns. Each answer waits in a thread; `programs_at_once` bounds the programs."""
        return sys.maxsize

    @property
    def answers_in_step(self) -> bool:
        """See TakingTurns."""
        return self.in_step

    def paths(self) -> Iterator[tuple[tuple[str | int, ...], PathKind, str]]:
        """See Spec. They include those of the program."""
        yield from super().paths()
        yield from ((("program", *where), kind, path) for where, kind, path in self.program.paths())

    def lacks(self) -> Issue | None:
        """See RollouterSection."""
        issue = self.program.lacks()
        return replace(issue, path=("program", *issue.path)) if issue else None

    def answering(self, seconds: float) -> Iterator[Answering]:
        """See RollouterSection. The program is started on an artificial prompt, and passes if it calls the policy."""
        assert isinstance(self.program, AgentProgram)
        if issue := self.program.lacks():
            yield Answering("agent", self.program.type, f"{issue.message}: {issue.given}")
            return
        begun = _Begun(self.program, Problem("", "1+1=", "", ""), endpoint(), lambda: None)
        arrived = begun.line.next(seconds)
        begun.close("this was only a test whether the program sends a request")
        yield Answering("agent", self.program.type, _why_not(arrived) if isinstance(arrived, Ended) else "")

    def bounds(self, max_response_length: int) -> TurnBounds:
        """See RollouterSection. Requests come before and between the turns, each of at least one token."""
        turns = min(max_response_length, self.max_turns * (self.turn_tokens or max_response_length))
        sampled = min(turns, self.sampled_tokens or turns)
        seconds = (self.max_turns + 1) * self.program_seconds
        return TurnBounds(self.max_turns, sampled, max_response_length - 1, max_response_length, seconds)

    def issues(self, max_response_length: int) -> Iterator[Issue]:
        """See RollouterSection."""
        yield from super().issues(max_response_length)
        if max_response_length < 3:
            yield Issue(
                "two turns and a request between them do not fit into a response",
                ("max_turns",),
                given=str(self.max_turns),
                hint="raise rollout.max_response_length to 3 or more: it includes the program's requests",
            )

    def counterpart(self, tokenizer: "PreTrainedTokenizerBase") -> Counterpart:
        """See TakingTurns."""
        return _Asking(self, tokenizer)


class _Asking(Counterpart):
    """Counterpart that runs the programs, which call the policy."""

    hears_all = True

    def __init__(self, options: Agent, tokenizer: "PreTrainedTokenizerBase") -> None:
        assert isinstance(options.program, AgentProgram)
        self.options, self.program = options, options.program
        self.places = threading.Semaphore(sys.maxsize if options.in_step else options.programs_at_once)
        self.endpoint = endpoint()
        self._chat = ChatTokens(tokenizer, options.template)

    def opening(self, conversation: Conversation) -> Question:
        """See Counterpart. Starts the program."""
        problem = conversation.prompt.problem
        asked = [as_clients_send(message) for message in problem.conversation()]
        history = History(self._chat, asked, conversation.prompt.token_ids)
        conversation.held["work"] = _Work(self, conversation, history)
        return self._question(conversation)

    def asked(self, conversation: Conversation, text: str) -> Question:
        """See Counterpart. The policy's turn answers the last request."""
        work: _Work = conversation.held["work"]
        request, context, sampled = work.request, work.context, conversation.turns[-1].token_ids
        number = conversation.sampled_turns - 1
        message = spoken(text, number, calls=bool(request.tools))
        work.history.note(request, context, message, sampled)
        work.replies.append(Reply(number, message, conversation.cut, len(context), len(sampled)))
        return self._question(conversation)

    def _question(self, conversation: Conversation) -> Question:
        work: _Work = conversation.held["work"]

        def late() -> list[Answer]:
            work.close("the run continues without it")
            return []

        def remember(answers: Sequence[Answer]) -> None:
            """Does nothing. The program is started again when an answer is needed that was not recorded. It gets the
            recorded answers first."""

        return Question(work.go_on, late, remember, at_once=False, seconds=math.inf)

    def turns(self, conversation: Conversation, answers: Sequence[Answer]) -> list[Turn] | None:
        """See Counterpart. Returns the tokens that a request adds to the policy's last context, or a restart if the
        request does not continue that context."""
        work: _Work = conversation.held["work"]
        told = json.loads(answers[0].text)
        if "messages" not in told:
            self._note_end(conversation, Ended(**told))
            return None
        request = Request(**told)
        if conversation.sampled_turns == self.options.max_turns:
            conversation.cut = True
            work.close(f"the response has had its {self.options.max_turns} turns")
            return None
        try:
            context = work.history.context(request)
        except ChatError as error:
            work.close(str(error))
            self._note_end(conversation, Ended(error=str(error)))
            return None
        before = conversation.context
        work.request, work.context, conversation.limit = request, context, request.limit
        if context[: len(before)] != before:
            return [Turn(context, restart=True)]
        new = context[len(before) :]
        return [Turn(new)] if new else []

    def _note_end(self, conversation: Conversation, ended: Ended) -> None:
        if not conversation.sampled_turns:
            raise SpecError(
                Issue(
                    "the agent's program ended without asking the policy anything",
                    ("rollout", "rollouter", "program"),
                    given=f"{self.program.type}; {_why_not(ended)}"[:600],
                    allowed="a program that asks for a chat completion at least once for each prompt",
                    hint="it must call the endpoint that it is given (OPENAI_BASE_URL), with the key that it is given",
                )
            )
        if ended.error:
            conversation.turns[-1] = replace(conversation.turns[-1], error=ended.error)
        if self.options.answer == "returned":
            conversation.answer = ended.answer or ""

    def close(self, conversation: Conversation) -> None:
        """See Counterpart."""
        if work := conversation.held.pop("work", None):
            work.close("the response has ended: there is no room for another turn")


def _why_not(ended: Ended) -> str:
    """Returns the reason why a program ended without asking anything."""
    return ended.error or f"it sent no request and returned {ended.answer!r}"


class _Work:
    """The work of a program on one response."""

    def __init__(self, asking: _Asking, conversation: Conversation, history: History) -> None:
        # Text of the policy may run in the program, or see the data of the program.
        self._asking, self._problem = asking, conversation.prompt.problem.public()
        self.history = history
        self.request = Request([], [], None)
        """The last request that was given to the policy."""
        self.context: tuple[int, ...] = ()
        """The tokens after which the policy answered that request."""
        self.replies: list[Reply] = []
        """Answers that the program has not received yet. There are several if an earlier attempt of the run got
        further."""
        self._lock = threading.Lock()
        self._begun: _Begun | None = None
        self._arrived: Asked | Ended | None = None
        self._closed = self._has_place = False

    def go_on(self) -> list[Answer]:
        """Gives the waiting answers to the program. Then waits for the program's next request, or its end."""
        arrived = self._arrived or self._begin()
        while self.replies and isinstance(arrived, Asked):
            arrived.answer(self.replies.pop(0))
            arrived = self._next()
        self._arrived = arrived
        if isinstance(arrived, Ended):
            return [Answer("", json.dumps(asdict(arrived)))]
        return [Answer("", json.dumps(asdict(arrived.request)))]

    def _begin(self) -> Asked | Ended:
        self._asking.places.acquire()
        with self._lock:
            self._has_place = True
            if not self._closed:
                asking = self._asking
                self._begun = _Begun(asking.program, self._problem, asking.endpoint, self._give_place)
        if not self._begun:
            self._give_place()
            return Ended(error="the run continues without it")
        return self._next()

    def _next(self) -> Asked | Ended:
        assert self._begun
        return self._begun.line.next(self._asking.options.program_seconds)

    def close(self, why: str) -> None:
        """Ends the program if it still runs, and refuses its requests. The first reason given is used."""
        with self._lock:
            self._closed, begun = True, self._begun
        if begun:
            begun.close(why)
        self._give_place()

    def _give_place(self) -> None:
        with self._lock:
            has_place, self._has_place = self._has_place, False
        if has_place:
            self._asking.places.release()


class _Begun:
    """A program that runs in its own thread, and its queue of requests."""

    def __init__(self, program: AgentProgram, problem: Problem, at: Endpoint, ended: Callable[[], None]) -> None:
        """Starts the program.

        Args:
            ended: called when the program has ended, before the line reports that.
        """
        self.line = at.open()
        self._program, self._problem, self._at, self._ended = program, problem, at, ended
        self._lock = threading.Lock()
        self._running: Running | None = None
        self._closed = False
        threading.Thread(target=self._run, name="an agent's program", daemon=True).start()

    def _run(self) -> None:
        try:
            running = self._program.begin(self._problem, self._at.base_url, self.line.key)
            with self._lock:
                self._running, closed = running, self._closed
            if closed:
                running.end()
            answer = running.result()
            half = half_character(answer or "")
            ended = Ended(error=f"its answer holds {half}") if half else Ended(answer)
        except Exception as error:  # any error of the program
            ended = Ended(error=f"{type(error).__name__}: {error}"[:2000])
        self._ended()
        self.line.finish(ended)

    def close(self, why: str) -> None:
        """Ends the program if it still runs, and refuses its requests."""
        with self._lock:
            self._closed, running = True, self._running
        self._at.close(self.line, why)
        if running:
            running.end()
