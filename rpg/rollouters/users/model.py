"""A user whose remarks come from a language model."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from pydantic import Field, model_validator

from rpg.rewards.judges.endpoint import (
    Drawn,
    Endpoint,
    EndpointSettings,
    RequestRefusedError,
    address_issues,
    key_of,
    trouble_of,
)
from rpg.rewards.judges.prompts import Message, harmless
from rpg.rollouters.user import Remark, Speaking, User
from rpg.types import Problem
from specs.errors import Issue, IssueError, SpecError
from specs.schema.base import execution
from specs.schema.execution import SecretReference

_AT = ("rollout", "rollouter", "user")
_ROLES = {"user": "assistant", "assistant": "user"}
_OPENING: Message = {"role": "user", "content": "Begin."}
"""Message before the user's first words, which the model writes: many chat templates require that a user speaks
first."""

logger = logging.getLogger(__name__)


class Model(User):
    """A language model at an address. It sees the conversation with roles swapped: the policy's turns are messages to
    it, and the problem and its own remarks are its messages. It can end the conversation with a word."""

    model: str = Field(min_length=1)
    """The model's name at the endpoint."""
    endpoint: str = execution()
    """Address of an OpenAI-compatible API up to /v1, http or https."""
    key: SecretReference | None = execution(None)
    """env:NAME or file:/PATH of the endpoint's key. Leave it out if the endpoint needs no key."""
    instruction: str = Field(min_length=1)
    """System message that describes the user and its aim to the model. {question} and {answer} stand for those of the
    problem, {user} for the texts in the problem's `columns.user`, one per line."""
    end: str = ""
    """Word that ends the conversation: a reply with it is not passed on. Empty means no such word."""
    temperature: float = Field(1.0, ge=0)
    """Temperature of its sampling."""
    max_tokens: int = Field(256, ge=1)
    """Largest number of tokens of a reply, in the model's own tokens."""
    timeout_seconds: float = execution(120.0, gt=0)
    """Seconds after which a call is aborted and retried."""
    patience_seconds: float = execution(1800.0, gt=0)
    """Seconds that the endpoint may be unreachable or refuse requests before the attempt ends, to be retried."""

    @property
    def own_seconds(self) -> float | None:
        """See UserSection. Waiting for an unavailable endpoint does not count."""
        return self.timeout_seconds

    def lacks(self) -> Issue | None:
        """See UserSection."""
        try:
            key_of(self.key or "", ())
        except SpecError as error:
            return error.issues[0]
        return None

    def trouble(self, seconds: float) -> str:
        """See UserSection."""
        found = trouble_of(self.endpoint, self.key or "", (), seconds=seconds)
        return f"{self.endpoint} {found}" if found else ""

    @contextmanager
    def speaking(self) -> Iterator[Speaking]:
        """See User."""
        settings = EndpointSettings(
            url=self.endpoint,
            model=self.model,
            key=self.key or "",
            path=_AT,
            timeout_seconds=self.timeout_seconds,
            patience_seconds=self.patience_seconds,
            who="user",
        )
        with closing(Endpoint(settings)) as endpoint:
            yield lambda problem, said, seed: self._reply(endpoint, problem, said, seed)

    def reply(self, problem: Problem, said: Sequence[str], seed: int) -> Remark | None:
        """See User."""
        with self.speaking() as reply:
            return reply(problem, said, seed)

    def _reply(self, endpoint: Endpoint, problem: Problem, said: Sequence[str], seed: int) -> Remark | None:
        drawn = Drawn(self.temperature, self.max_tokens, seed)
        try:
            text = endpoint.ask(self._messages(problem, said), drawn).text.strip()
        except RequestRefusedError as error:  # for example, the conversation is too long for it
            logger.warning("the user at %s stopped answering in a conversation: %s", self.endpoint, error)
            return None
        return Remark(text) if text and not (self.end and self.end in text) else None

    def _messages(self, problem: Problem, said: Sequence[str]) -> list[Message]:
        began = [message for message in problem.conversation() if message["role"] in _ROLES]
        after = [
            {"role": "user", "content": harmless(text)} if place % 2 == 0 else {"role": "assistant", "content": text}
            for place, text in enumerate(said)
        ]
        return [
            {"role": "system", "content": self._filled(problem)},
            _OPENING,
            *({"role": _ROLES[each["role"]], "content": each["content"]} for each in began),
            *after,
        ]

    def _filled(self, problem: Problem) -> str:
        def value(match: re.Match[str]) -> str:
            if match[1] != "user":
                return problem.question_text if match[1] == "question" else problem.answer
            if "user" not in problem.metadata:
                hint = "name it in the source's `columns: {user: COLUMN}`"
                raise SpecError(Issue("a problem has no {user}", (*_AT, "instruction"), problem.problem_id, hint=hint))
            return "\n".join(problem.metadata["user"])

        return re.sub(r"\{(question|answer|user)\}", value, self.instruction)

    @model_validator(mode="after")
    def _check(self) -> "Model":
        if issue := next(self._issues(), None):
            raise IssueError(issue)
        return self

    def _issues(self) -> Iterator[Issue]:
        yield from address_issues(self.endpoint)
        if self.end and self.end not in self.instruction:
            hint = f"write there when it is to reply with {self.end}"
            yield Issue("the instruction does not tell the model this word", ("end",), self.end, hint=hint)
