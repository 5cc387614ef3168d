"""The Protocol of every sampler, and the settings with which it is opened."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from rpg.types import Admit, NextTurns, OnResponse, Pause, Rollout, RolloutGroup, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADMISSION_STEPS = 16
"""Number of decoding steps between two calls that ask how many prompts may start. Such a call waits for the scores of
ended responses, which are computed during these steps, and the ranks exchange which responses have ended."""


AdmitMore = Callable[[Pause], int | None]
"""Function with which a sampler's own loop admits prompts. It returns how many may have started, or None to end the
call."""


def pause_of(*, idle: bool, steps: int, ended: bool) -> Pause | None:
    """Returns the reason why the loop asks for more turns now; None if it does not.

    Args:
        idle: whether nothing is being sampled.
        steps: decoding steps since it last asked for another reason than an end.
        ended: whether a turn has ended since it last asked, and the caller wants to be asked then.
    """
    if idle:
        return "idle"
    if steps == ADMISSION_STEPS:
        return "steps"
    return "ended" if ended else None


class Sampler(Protocol):
    """Sampler of responses from the policy whose weights are loaded into it. Any thread may use it, one at a time."""

    policy_version: int
    """Number of times that weights were loaded."""
    engines: int
    """Number of engines over which the prompts of a call are distributed."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        on_response: OnResponse | None = None,
    ) -> list[RolloutGroup]:
        """Returns `group_size` responses to each prompt, in the order of the prompts.

        Args:
            prompts: token ids of each prompt.
            group_size: responses per prompt; the prompt is computed once.
            sampling: temperature, top_p, top_k, and the conditions that end a response.
            seeds: one per prompt; the same prompt, seed and weights give the same responses whatever else is in the
                batch, as far as the engine's arithmetic allows.
            limits: most response tokens, one per prompt, if `sampling.max_response_length` does not hold for all: a
                response that continues after other turns has less room left.
            on_response: called in this thread once for each response that ends, in any order, before this returns. An
                exception in it ends the call.
        Raises:
            ValueError: a prompt is empty or leaves no room for a response, seeds or limits do not match the prompts, or
                there are stop texts without a tokenizer.
        """
        ...

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        sampling: Sampling,
        seeds: Sequence[int],
        admit: Admit,
        on_response: OnResponse,
    ) -> int:
        """Samples like `generate`, but starts prompts as `admit` allows, until `admit` ends the call.

        `admit` is called at the start, after every ADMISSION_STEPS decoding steps, and whenever nothing is being
        sampled. So the lengths of the responses and the answers of `admit` decide which responses are decoded together,
        and timing does not.

        Args:
            prompts: all prompts that may be admitted, in the order in which they start.
            admit: called in this thread. An exception in it ends the call.
            on_response: see `generate`. Not called for a response that is unfinished at the end.
        Returns:
            Sampled tokens of the responses that were unfinished at the end.
        Raises:
            ValueError: see `generate`.
        """
        ...

    def serve(
        self,
        next_turns: NextTurns,
        *,
        sampling: Sampling,
        on_response: OnResponse,
        on_unfinished: OnResponse | None = None,
    ) -> int:
        """Samples turns as they are requested, until `next_turns` ends the call. A turn starts while others are
        running.

        `next_turns` is called at the start, when turns have ended, after every ADMISSION_STEPS decoding steps, and
        whenever nothing is being sampled.

        Args:
            next_turns: called in this thread. An exception in it ends the call.
            sampling: temperature, top_p, top_k, and the conditions that end a turn.
            on_response: called in this thread with the number of a turn, counted from 0 in the order of the requests,
                and the turn as a separate rollout. Not called for a turn that is unfinished at the end.
            on_unfinished: called like `on_response`, at the end, with the tokens so far of each turn that is unfinished
                and has any. With it, no request continues a turn that has ended.
        Returns:
            Sampled tokens of the turns that were unfinished at the end.
        Raises:
            ValueError: a context is empty or leaves no room for a token, or a limit is below 1.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Loads the learner's weights. Names are those of the transformers model."""
        ...

    def logprobs(
        self, token_ids: Sequence[int], *, prompt_length: int, temperature: float = 1.0, engine: int = 0
    ) -> list[float]:
        """Returns logprobs of the tokens after the prompt, under the present weights of one of the engines, nats. The
        sentinel uses them."""
        ...

    def forget(self) -> None:
        """Drops the state kept from earlier calls of `generate`, so that the next call does not depend on them."""
        ...

    def sleep(self) -> None:
        """Frees the memory that the learner needs. Nothing is sampled until `load_weights` is called."""
        ...

    def close(self) -> None:
        """Frees all resources of the sampler."""
        ...


class InProcessSampler(ABC):
    """A Sampler in this process, which implements `generate` and `stream` with one sampling method."""

    policy_version = 0
    engines = 1

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        on_response: OnResponse | None = None,
    ) -> list[RolloutGroup]:
        """Returns `group_size` responses to each prompt; see Sampler."""
        rollouts: dict[int, Rollout] = {}

        def ended(index: int, rollout: Rollout) -> None:
            rollouts[index] = rollout
            if on_response:
                on_response(index, rollout)

        self._sample(prompts, group_size, sampling, seeds, self._limits(prompts, sampling, seeds, limits), ended)
        return [
            RolloutGroup(
                tuple(prompt), tuple(rollouts[i * group_size + j] for j in range(group_size)), self.policy_version
            )
            for i, prompt in enumerate(prompts)
        ]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        sampling: Sampling,
        seeds: Sequence[int],
        admit: Admit,
        on_response: OnResponse,
    ) -> int:
        """Samples prompts as they are admitted; see Sampler."""
        limits = self._limits(prompts, sampling, seeds, None)

        def admitted(_: Pause) -> int | None:
            return admit()

        return self._sample(prompts, group_size, sampling, seeds, limits, on_response, admitted)

    def serve(
        self,
        next_turns: NextTurns,
        *,
        sampling: Sampling,
        on_response: OnResponse,
        on_unfinished: OnResponse | None = None,
    ) -> int:
        """Samples turns as they are requested; see Sampler."""
        contexts: list[Sequence[int]] = []
        seeds: list[int] = []
        limits: list[int] = []

        def admitted(pause: Pause) -> int | None:
            if (turns := next_turns(pause)) is None:
                return None
            asked = [turn.token_ids for turn in turns]
            drawn = [turn.seed for turn in turns]
            limits.extend(self._limits(asked, sampling, drawn, [turn.limit for turn in turns]))
            contexts.extend(asked)
            seeds.extend(drawn)
            return len(contexts)

        return self._sample(
            contexts, 1, sampling, seeds, limits, on_response, admitted, open_ended=True, on_unfinished=on_unfinished
        )

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Returns the most tokens of prompt and response together."""

    def _limits(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Sequence[int] | None,
    ) -> list[int]:
        return response_limits(prompts, sampling, seeds, limits, max_length=self.max_length)

    @abstractmethod
    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Sequence[int],
        on_response: OnResponse,
        admit: AdmitMore | None = None,
        *,
        open_ended: bool = False,
        on_unfinished: OnResponse | None = None,
    ) -> int:
        """Samples prompts, all at once or as they are admitted. Returns the number of tokens of responses that did not
        end.

        Args:
            prompts: `admit` may append to them, to the seeds and to the limits.
            group_size: number of responses to each prompt.
            sampling: see Sampler.
            seeds: one per prompt.
            limits: most response tokens of each prompt, for which the sampler has room.
            on_response: see Sampler.
            admit: see Sampler. None: all prompts start.
            open_ended: whether `admit` is also called when responses have ended.
            on_unfinished: see Sampler.serve.
        """


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """Settings of a sampler in addition to its section of the spec."""

    weights_dir: Path
    """A transformers model directory with config, safetensors and tokenizer."""
    device: torch.device
    """Device on which to sample."""
    max_length: int
    """Largest number of tokens of prompt and response together."""
    seed: int
    """Seed of the sampler itself. The samples depend only on the seeds given to `generate`."""
    learner_model: "PreTrainedModel | None" = None
    """The learner's own module, for a sampler that can use it; None if the sampler needs its own weights."""
    beside_learner: bool = False
    """Whether a learner in this process uses the GPU's memory while the sampler is idle."""
    precision: Literal["float32", "bfloat16"] | None = None
    """The learner's precision, for a sampler that runs its own transformers model. None means float32 on a CPU, else
    the precision of the weights."""


def response_limits(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    limits: Sequence[int] | None,
    *,
    max_length: int,
) -> list[int]:
    """Returns the largest number of response tokens for each prompt: the requested limit, or less if the prompt leaves
    less room.

    Raises:
        ValueError: a prompt is empty, leaves no room for a response, or lacks a seed or a limit.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds: each prompt needs exactly one seed")
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < max_length:
            allowed = f"allowed: 1 to {max_length - 1}, which leave room for a response"
            raise ValueError(f"prompt {index} has {len(prompt)} tokens; {allowed}")
    most = [sampling.max_response_length] * len(prompts) if limits is None else limits
    if len(most) != len(prompts) or min(most, default=1) < 1:
        given = f"{len(prompts)} prompts but limits {list(most)}"
        raise ValueError(f"{given}: each prompt needs exactly one limit, of at least 1")
    return [min(limit, max_length - len(prompt)) for prompt, limit in zip(prompts, most, strict=True)]
