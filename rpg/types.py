"""Defines the types of the training loop: plain frozen dataclasses with a docstring for every field."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from rpg.messages import message

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length"]
Versions = tuple[tuple[int, int], ...]
"""The parts of a response in order: for each, the version of the policy that sampled it, and its number of sampled
tokens."""
_SHOWN_OF_TESTS = ("kind", "function", "shown")
"""Keys of tests that the prompt also shows."""


@message
@dataclass(frozen=True, slots=True)
class Problem:
    """A problem as the data stage published it."""

    problem_id: str
    """Hash of the content. Equal problems have equal ids."""
    prompt: str
    """The text that the model sees."""
    answer: str
    """The gold answer."""
    dataset: str
    """Name of the set that the problem came from."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Data that the scorer needs beyond the answer (reasoning-gym's entry)."""
    cluster: str = ""
    """Name of the cluster of related problems in its set; empty if it belongs to no cluster."""
    source: str = ""
    """Path of the problem's set in the spec, such as `data.train.0`; empty if no set has its own reward."""
    messages: str = ""
    """The chat messages of the prompt as JSON, before the policy's template turned them into text; empty without
    messages."""
    shown: tuple[str, ...] = ()
    """Keys of `metadata` that `public` keeps."""
    prefill: str = ""
    """Beginning of each reply that the template itself writes, such as `<think>`; empty if it writes none. Scorers see
    it before the response."""

    def public(self) -> "Problem":
        """Returns the problem for processes that the policy can reach: without the gold answer, and with only those
        parts of `metadata` that are named in `shown` or are tests that the prompt shows."""
        kept = {name: self.metadata[name] for name in self.shown if name in self.metadata}
        tests = self.metadata.get("tests")
        if isinstance(tests, dict) and "hidden" in tests:
            kept["tests"] = {name: tests[name] for name in _SHOWN_OF_TESTS if name in tests}
        return replace(self, answer="", metadata=kept)

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the prompt as chat messages."""
        return json.loads(self.messages) if self.messages else [{"role": "user", "content": self.prompt}]

    @property
    def question_text(self) -> str:
        """Returns the prompt as text, without the policy's chat template."""
        return "\n\n".join(message["content"] for message in self.conversation() if message["role"] != "system")


@message
@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings with which responses are drawn."""

    temperature: float
    """Divisor of the logits; 0 is greedy."""
    top_p: float
    """Nucleus probability in (0, 1]. 1 keeps all tokens."""
    max_response_length: int
    """Largest number of tokens of a response, the end token included."""
    top_k: int = 0
    """Number of likeliest tokens to keep before the nucleus is applied. 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Texts that end a response. The token that completes such a text is the response's last."""
    tells_experts: bool = False
    """Whether responses report the experts of their tokens; see Rollout."""


@message
@dataclass(frozen=True, slots=True)
class Turn:
    """A part of a response: tokens that the policy sampled, or tokens from its environment, such as a tool's result or
    a user's message. Sampled tokens are the engine's own, never re-encoded text."""

    token_ids: tuple[int, ...]
    """Tokens of the turn, at least one. A sampled turn includes its end token, if it has one."""
    logprobs: tuple[float, ...] | None = None
    """Logprob of each sampled token under the distribution that it was drawn from, nats. That distribution has the
    temperature, is cut to top_k and the nucleus, and renormalised. It differs from the learner's if the cut removed
    tokens. None if the tokens were given."""
    tool: str = ""
    """Name of the tool that gave the tokens; empty if no tool did."""
    error: str = ""
    """Reason why a call was answered with an error, or why an agent's program failed after this turn; empty without
    error."""
    seconds: float = 0.0
    """Wall time of the tool."""
    reward: float | None = None
    """Reward of this sampled turn alone, reward units, in addition to the reward of the whole response; None if it has
    none."""
    restart: bool = False
    """Whether these given tokens are the whole context of all later turns: from here on the policy sees nothing before
    them, not even the prompt."""

    def __post_init__(self) -> None:
        """Raises ValueError for a turn without tokens, without a logprob for each sampled token, or for a sampled
        restart."""
        if not self.token_ids:
            raise ValueError("a turn has at least one token")
        if self.restart and self.logprobs is not None:
            raise ValueError("a context is given, not sampled")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} sampled tokens have {len(self.logprobs)} logprobs")

    @property
    def sampled(self) -> bool:
        """Whether the policy sampled these tokens. Training uses only sampled tokens."""
        return self.logprobs is not None


@message
@dataclass(frozen=True, slots=True)
class Rollout:
    """A response: its turns in order. A single-turn response is one sampled turn."""

    turns: tuple[Turn, ...]
    """Turns of the response, at least one of them sampled."""
    finish_reason: FinishReason
    """stop: the response ended by itself (end token, stop text, or its environment's decision). length: it was cut at
    max_response_length."""
    answer: str | None = None
    """Text to score, if the environment sets one. None means the text of the last sampled turn."""
    experts: "npt.NDArray[np.integer[Any]] | None" = field(default=None, compare=False)
    """Experts to which the engine routed each token of prompt and response except the last. None if not requested.
    [prompt + response - 1, layers, experts per token]"""
    versions: Versions = ()
    """Versions of the policies that sampled the response, one after another; empty if the group's policy sampled all of
    it."""

    def __post_init__(self) -> None:
        """Raises ValueError if no turn was sampled."""
        if not any(turn.sampled for turn in self.turns):
            raise ValueError("a rollout has at least one sampled turn")

    @property
    def response_ids(self) -> tuple[int, ...]:
        """Returns all tokens of the response, including given ones. [n]"""
        if len(self.turns) == 1:
            return self.turns[0].token_ids
        return tuple(token for turn in self.turns for token in turn.token_ids)

    @property
    def length(self) -> int:
        """Returns the number of tokens of the response, including given ones."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def num_sampled(self) -> int:
        """Returns the number of tokens of the response that the policy sampled."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.sampled)

    @property
    def rollout_logprobs(self) -> tuple[float, ...]:
        """Returns the logprobs of the sampled tokens, nats; see Turn."""
        return tuple(logprob for turn in self.turns for logprob in turn.logprobs or ())

    @property
    def turn_rewards(self) -> float:
        """Returns the sum of the rewards of the turns, reward units."""
        return sum(turn.reward or 0.0 for turn in self.turns)

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """Returns the tokens of the last sampled turn. Only this turn is scored, so that given text never counts as the
        policy's answer."""
        return next(turn.token_ids for turn in reversed(self.turns) if turn.sampled)


@message
@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn as it is recorded."""

    sampled: bool
    num_tokens: int
    text: str
    """The turn's tokens as text, including special tokens."""
    tool: str = ""
    error: str = ""
    seconds: float = 0.0
    reward: float | None = None
    restart: bool = False
    """See Turn."""


@message
@dataclass(frozen=True, slots=True)
class TurnCounts:
    """The counts of a response's turns."""

    sampled: int
    """Number of turns that the policy sampled."""
    calls: int
    """Number of tool calls that were answered."""
    errors: int
    """Number of tool calls that were answered with an error."""
    seconds: float
    """Wall time of the tools, seconds."""
    rewards: tuple[float, ...] = ()
    """Reward of each turn of the policy; empty if the environment does not reward turns."""
    contexts: tuple[tuple[int, int], ...] = ()
    """Restarts in order: the position of each in the response's tokens, and the length of the context given there.
    Empty if the prompt is the context of the whole response."""


@message
@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request for a turn that the policy must sample."""

    token_ids: tuple[int, ...]
    """Context of the turn: the prompt and the turns before this one."""
    seed: int
    """Seed of all randomness in the turn."""
    limit: int
    """Largest number of tokens of the turn."""
    prompt: int = 0
    """Index of the prompt in the call. The engine that has cached a prompt's turns also samples the later ones."""


OnResponse = Callable[[int, Rollout], None]
"""Callback (index, response), called once the response has ended. The i-th response to prompt p has index
p * group_size + i."""
Admit = Callable[[], int | None]
"""Function that returns how many of a call's prompts, from the first on, may have started by now. The number never
falls. None ends the call, because enough has been sampled."""


Pause = Literal["idle", "steps", "ended"]
"""Reason why a sampler asks for turns. idle: nothing is running. steps: a set number of decoding steps has passed.
ended: a turn has ended."""
NextTurns = Callable[[Pause], Sequence[TurnRequest] | None]
"""Function that returns the turns that begin now; None ends the call."""


@message
@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The responses to one prompt."""

    prompt_ids: tuple[int, ...]
    rollouts: tuple[Rollout, ...]
    policy_version: int
    """Number of weight loads of the sampler before these responses were drawn."""
