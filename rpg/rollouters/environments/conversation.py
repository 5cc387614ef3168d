"""The environment of a conversation: the policy speaks, a user answers, and the context grows."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from rpg.rollouters.journal import Answer
from rpg.rollouters.taking_turns import Conversation as UnderWay
from rpg.rollouters.taking_turns import Counterpart, Question, TakingTurns
from rpg.rollouters.user import User
from rpg.tools.calls import answer_ids, around_words
from rpg.types import Turn
from specs.errors import Issue
from specs.schema.base import execution
from specs.schema.rollout import Answering, NamedUser, TurnBounds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Conversation(TakingTurns):
    """A conversation of the policy with a user, whose remarks are context and are not trained on. Responses do not wait
    for each other. The user answers each turn that ends by its end token or a stop text. The last turn is scored."""

    user: NamedUser
    """User that speaks with the policy, by name or with its options."""
    words: str | None = Field(None, pattern=r"\{words\}")
    """Text that the policy gets for a remark, in which {words} stands for the user's words. If left out, the model's
    chat template writes it."""
    words_tokens: int = Field(256, ge=1)
    """Largest number of tokens of one remark, including the text around it. A longer remark is cut off."""
    user_seconds: float = Field(300.0, gt=0)
    """Longest time in seconds of the user for a remark. If the user takes longer, the response ends. A model has its
    own limits instead."""
    users_at_once: int = execution(32, ge=1)
    """Largest number of concurrent users on a rank."""

    @property
    def asked_at_once(self) -> int:
        """See TakingTurns."""
        return self.users_at_once

    @property
    def rewards_turns(self) -> bool:
        """See RollouterSection."""
        return self.user.rewards_turns

    def bounds(self, max_response_length: int) -> TurnBounds:
        """See RollouterSection. A remark of at least one token comes between two turns of the policy."""
        remarks = min(self.max_turns - 1, self.user.remarks or self.max_turns)
        tokens = min(max_response_length, (remarks + 1) * (self.turn_tokens or max_response_length))
        sampled = min(tokens, self.sampled_tokens or tokens)
        given = min(max(0, max_response_length - 2), remarks * self.words_tokens)
        length = min(max_response_length, sampled + given)
        seconds = 0.0 if self.user.immediate else self.user.own_seconds or self.user_seconds
        return TurnBounds(remarks + 1, sampled, given, length, remarks * seconds)

    def lacks(self) -> Issue | None:
        """See RollouterSection."""
        issue = self.user.lacks()
        return replace(issue, path=("user", *issue.path)) if issue else None

    def answering(self, seconds: float) -> Iterator[Answering]:
        """See RollouterSection."""
        yield Answering("user", self.user.type, self.user.trouble(seconds))

    def issues(self, max_response_length: int) -> Iterator[Issue]:
        """See RollouterSection."""
        yield from super().issues(max_response_length)
        if self.words_tokens + 2 > max_response_length:
            yield Issue(
                "two turns and a user's remark between them do not fit into a response",
                ("words_tokens",),
                given=str(self.words_tokens),
                allowed=f"at most {max_response_length - 2}: rollout.max_response_length includes the user's remarks",
                hint="raise rollout.max_response_length, or lower words_tokens",
            )

    def counterpart(self, tokenizer: "PreTrainedTokenizerBase") -> Counterpart:
        """See TakingTurns."""
        return _Speaking(self, tokenizer)


class _Speaking(Counterpart):
    """Counterpart that speaks as the user."""

    def __init__(self, options: Conversation, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._options, self._tokenizer = options, tokenizer
        if options.words is None:
            self._around = around_words(tokenizer)
        else:
            before, _, after = options.words.partition("{words}")
            self._around = before, after
        assert isinstance(options.user, User)
        self._user = options.user
        self._opened = ExitStack()
        self._reply = self._opened.enter_context(options.user.speaking())

    def asked(self, conversation: UnderWay, text: str) -> Question | None:
        """See Counterpart."""
        said: list[str] = conversation.held.setdefault("said", [])
        said.append(text)
        before, seed = tuple(said), conversation.seed

        def answer() -> list[Answer]:
            remark = self._reply(conversation.prompt.problem, before, seed)
            return [Answer("", remark.text, reward=remark.reward)] if remark else []

        def late() -> list[Answer]:
            return []

        def remember(answers: Sequence[Answer]) -> None:
            """Does nothing, because a user keeps no state."""

        seconds = self._options.user_seconds if self._user.own_seconds is None else math.inf
        return Question(answer, late, remember, self._user.immediate, seconds)

    def turns(self, conversation: UnderWay, answers: Sequence[Answer]) -> list[Turn]:
        """See Counterpart."""
        (answer,) = answers
        conversation.held["said"].append(answer.text)
        return [Turn(answer_ids(self._tokenizer, answer.text, self._around, most=self._options.words_tokens))]

    def close(self, conversation: UnderWay) -> None:
        """See Counterpart. There is nothing to end."""

    def leave(self) -> None:
        """See Counterpart."""
        self._opened.close()
