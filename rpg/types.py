"""The vocabulary of the loop: plain, frozen, every field documented."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from rpg.messages import message

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length"]
_SHOWN_OF_TESTS = ("kind", "function", "shown")
"""Parts of the tests that the prompt shows too."""


@message
@dataclass(frozen=True, slots=True)
class Problem:
    """One problem as the data stage published it."""

    problem_id: str
    """Hash of the content, so that copies share it."""
    prompt: str
    """The text that the model sees."""
    answer: str
    """The gold answer."""
    dataset: str
    """Name of the set it came from."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the scorer needs beyond the answer (reasoning-gym's entry)."""
    cluster: str = ""
    """Name of what it shares with other problems of its set; empty: nothing."""
    source: str = ""
    """Place of its set in the spec, such as `data.train.0`; empty where no set has a reward of its own."""
    messages: str = ""
    """The chat messages of the prompt, JSON, before the policy's template made a text of them; empty: it has none."""
    shown: tuple[str, ...] = ()
    """Names in `metadata` that `public` keeps."""
    prefill: str = ""
    """Beginning of each reply that the template writes itself, such as `<think>`; empty: it writes none. Scorers see it
    before the response."""

    def public(self) -> "Problem":
        """Returns the problem as a process may have it that the policy can reach: without the gold answer, and of
        `metadata` with the names in `shown` and the tests that the prompt shows alone."""
        kept = {name: self.metadata[name] for name in self.shown if name in self.metadata}
        tests = self.metadata.get("tests")
        if isinstance(tests, dict) and "hidden" in tests:
            kept["tests"] = {name: tests[name] for name in _SHOWN_OF_TESTS if name in tests}
        return replace(self, answer="", metadata=kept)

    def conversation(self) -> list[dict[str, Any]]:
        """What was asked, as chat messages."""
        return json.loads(self.messages) if self.messages else [{"role": "user", "content": self.prompt}]

    @property
    def question_text(self) -> str:
        """What was asked, without the policy's chat template."""
        return "\n\n".join(message["content"] for message in self.conversation() if message["role"] != "system")


@message
@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn."""

    temperature: float
    """Logits are divided by it; 0 is greedy."""
    top_p: float
    """Nucleus probability in (0, 1]; 1 is all tokens."""
    max_response_length: int
    """Tokens at most, the end token included."""
    top_k: int = 0
    """The likeliest tokens only, the nucleus taken of what is left; 0 is all."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; the token that completes one is its last."""
    tells_experts: bool = False
    """Whether responses tell the experts of their tokens, see Rollout."""


@message
@dataclass(frozen=True, slots=True)
class Turn:
    """A stretch of a response: tokens that the policy sampled, or tokens that its environment gave it (what a tool
    returned, what a user said). Sampled tokens are what the engine drew, never re-encoded text."""

    token_ids: tuple[int, ...]
    """At least one; of a sampled turn the end token included where there is one."""
    logprobs: tuple[float, ...] | None = None
    """Logprob of each sampled token under the distribution it was drawn from, nats: tempered, cut to top_k and the
    nucleus, and renormalised. They differ from the learner's wherever a cut took something away. None: the tokens were
    given."""
    tool: str = ""
    """Name of the tool that gave the tokens; empty: no tool did."""
    error: str = ""
    """Why a call was not answered otherwise, or an agent's program failed behind this turn; empty: nothing went
    wrong."""
    seconds: float = 0.0
    """Wall time that the tool took."""
    reward: float | None = None
    """Reward of a sampled turn by itself, reward units, beside that of the whole response; None: it has none."""
    restart: bool = False
    """Whether these given tokens are the whole context of what follows: nothing before them, the prompt included, is
    seen from here on."""

    def __post_init__(self) -> None:
        """Raises ValueError where there is no token, not a logprob for each sampled one, or a sampled restart."""
        if not self.token_ids:
            raise ValueError("a turn has at least one token")
        if self.restart and self.logprobs is not None:
            raise ValueError("a context is given, not sampled")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} sampled tokens have {len(self.logprobs)} logprobs")

    @property
    def sampled(self) -> bool:
        """Whether the policy sampled these tokens, so that they are trained on."""
        return self.logprobs is not None


@message
@dataclass(frozen=True, slots=True)
class Rollout:
    """One response: its turns in order. A response of a single turn is one sampled turn."""

    turns: tuple[Turn, ...]
    """At least one of them sampled."""
    finish_reason: FinishReason
    """stop: it ended by itself (the end token, a stop text, its environment's decision); length: it was cut at
    max_response_length."""
    answer: str | None = None
    """Text that is scored, where its environment says it; None: that of the last sampled turn."""
    experts: "npt.NDArray[np.integer[Any]] | None" = field(default=None, compare=False)
    """Experts to which the engine sent each token of prompt and response but the last. None: it was not asked.
    [prompt + response - 1, layers, experts a token]"""

    def __post_init__(self) -> None:
        """Raises ValueError where nothing was sampled."""
        if not any(turn.sampled for turn in self.turns):
            raise ValueError("a rollout has at least one sampled turn")

    @property
    def response_ids(self) -> tuple[int, ...]:
        """All tokens of the response, the given ones included. [n]"""
        if len(self.turns) == 1:
            return self.turns[0].token_ids
        return tuple(token for turn in self.turns for token in turn.token_ids)

    @property
    def length(self) -> int:
        """Tokens of the response, the given ones included."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def num_sampled(self) -> int:
        """Tokens of the response that the policy sampled."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.sampled)

    @property
    def rollout_logprobs(self) -> tuple[float, ...]:
        """Logprobs of the sampled tokens alone, nats; see Turn."""
        return tuple(logprob for turn in self.turns for logprob in turn.logprobs or ())

    @property
    def turn_rewards(self) -> float:
        """Rewards of the turns together, reward units."""
        return sum(turn.reward or 0.0 for turn in self.turns)

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The last sampled turn: what is scored, so that no given text passes for the policy's answer."""
        return next(turn.token_ids for turn in reversed(self.turns) if turn.sampled)


@message
@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn as the record keeps it."""

    sampled: bool
    num_tokens: int
    text: str
    """Its tokens as text, special tokens included."""
    tool: str = ""
    error: str = ""
    seconds: float = 0.0
    reward: float | None = None
    restart: bool = False
    """See Turn."""


@message
@dataclass(frozen=True, slots=True)
class TurnCounts:
    """Counts of a response's turns."""

    sampled: int
    """Turns of the policy."""
    calls: int
    """Calls of tools that were answered."""
    errors: int
    """Calls that were answered by an error."""
    seconds: float
    """Wall time that the tools took."""
    rewards: tuple[float, ...] = ()
    """Reward of each turn of the policy; empty: the environment rewards none."""
    contexts: tuple[tuple[int, int], ...] = ()
    """Restarts in order: of each its place among the response's tokens and the length of the context that is given
    there; empty: the prompt is the context of all."""


@message
@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn that the policy is to sample."""

    token_ids: tuple[int, ...]
    """Context: the prompt, and the turns before this one."""
    seed: int
    """All that is random in the turn follows from it."""
    limit: int
    """Tokens at most."""


OnResponse = Callable[[int, Rollout], None]
"""(index, response), called once the response has ended; the i-th response to prompt p has index p * group_size + i."""
Admit = Callable[[], int | None]
"""How many of a call's prompts, from the first on, may have begun by now: never fewer than before. None: enough has
been sampled, and the call ends."""


Pause = Literal["idle", "steps", "ended"]
"""When a sampler asks for turns: idle: nothing is under way; steps: so many decoding steps have passed; ended: a turn
has ended."""
NextTurns = Callable[[Pause], Sequence[TurnRequest] | None]
"""Turns that begin now. None: the call ends."""


@message
@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The responses to one prompt."""

    prompt_ids: tuple[int, ...]
    rollouts: tuple[Rollout, ...]
    policy_version: int
    """Number of weight loads of the sampler before these were drawn."""
