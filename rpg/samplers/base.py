"""The Protocol of every sampler, and the settings that it is opened with."""

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
"""Decoding steps between two questions of how many prompts may begin. The scores of what has ended are waited for at
each, so they are computed during these steps; and the ranks exchange what has ended."""


AdmitMore = Callable[[Pause], int | None]
"""Admission of prompts in a sampler's own loop: how many may have begun, or None for the end of the call."""


def pause_of(*, idle: bool, steps: int, ended: bool) -> Pause | None:
    """Whether the loop asks for more now, and why.

    Args:
        idle: nothing is under way.
        steps: decoding steps since it asked for another reason than an end.
        ended: whether a turn has ended since it asked, and the caller wants to know.
    """
    if idle:
        return "idle"
    if steps == ADMISSION_STEPS:
        return "steps"
    return "ended" if ended else None


class Sampler(Protocol):
    """Draws responses from a policy whose weights it is given. Any thread may use it, one at a time."""

    policy_version: int
    """Number of times that weights were loaded."""

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
        """`group_size` responses to each prompt, in the order of the prompts.

        Args:
            prompts: token ids of each prompt.
            group_size: responses per prompt; the prompt is computed once.
            sampling: temperature, top_p, top_k, what ends a response.
            seeds: one per prompt; the same prompt, seed and weights give the same responses whatever else is in the
                batch, as far as the engine's arithmetic allows.
            limits: one per prompt, response tokens at most, where `sampling.max_response_length` is not that of all: a
                response that goes on after other turns has less room left.
            on_response: called in this thread as responses end, each once, in any order, before this returns. What it
                raises ends the call.
        Raises:
            ValueError: a prompt that is empty or leaves no room for a response, seeds or limits that do not match the
                prompts, or stop texts without a tokenizer.
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
        """Samples as `generate` does, beginning prompts as `admit` allows, until that ends the call.

        `admit` is asked at the start, after every ADMISSION_STEPS decoding steps, and whenever nothing is under way. So
        which responses are decoded together follows from their lengths and from the answers of `admit`, and not from
        how long anything takes.

        Args:
            prompts: all that may be admitted, in the order in which they begin.
            admit: called in this thread. What it raises ends the call.
            on_response: see `generate`. Not called for a response that is under way at the end.
        Returns:
            Sampled tokens of the responses that were under way at the end.
        Raises:
            ValueError: see `generate`.
        """
        ...

    def serve(self, next_turns: NextTurns, *, sampling: Sampling, on_response: OnResponse) -> int:
        """Samples turns as they are asked for, until `next_turns` ends the call: a turn begins while others go on.

        `next_turns` is asked at the start, when turns have ended, after every ADMISSION_STEPS decoding steps, and
        whenever nothing is under way.

        Args:
            next_turns: called in this thread. What it raises ends the call.
            sampling: temperature, top_p, top_k, what ends a turn.
            on_response: called in this thread with the number of a turn, counted from 0 in the order of the requests,
                and the turn as a rollout of its own. Not called for a turn that is under way at the end.
        Returns:
            Sampled tokens of the turns that were under way at the end.
        Raises:
            ValueError: a context that is empty or leaves no room for a token, or a limit below 1.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Takes over the learner's weights, by the names of the transformers model."""
        ...

    def logprobs(self, token_ids: Sequence[int], *, prompt_length: int, temperature: float = 1.0) -> list[float]:
        """Logprobs of the tokens after the prompt, under the sampler's present weights, nats; for the sentinel."""
        ...

    def forget(self) -> None:
        """Drops what is kept of earlier calls of `generate`, so that the next one is as if they had not been."""
        ...

    def sleep(self) -> None:
        """Gives the learner the memory that it is to give. Nothing is sampled until `load_weights` is called."""
        ...

    def close(self) -> None:
        """Frees what the sampler holds."""
        ...


class InProcessSampler(ABC):
    """A Sampler in this process: `generate` and `stream` in terms of one method that samples."""

    policy_version = 0

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
        """`group_size` responses to each prompt; see Sampler."""
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

    def serve(self, next_turns: NextTurns, *, sampling: Sampling, on_response: OnResponse) -> int:
        """Samples turns as they are asked for; see Sampler."""
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

        return self._sample(contexts, 1, sampling, seeds, limits, on_response, admitted, open_ended=True)

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Tokens of prompt and response together at most."""

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
    ) -> int:
        """Samples prompts, all at once or as they are admitted. Returns the tokens of responses that did not end.

        Args:
            prompts: `admit` may append to them, to the seeds and to the limits.
            group_size: responses to each prompt.
            sampling: see Sampler.
            seeds: one per prompt.
            limits: response tokens of each prompt at most, for which there is room.
            on_response: see Sampler.
            admit: None: all prompts begin.
            open_ended: whether `admit` is asked when responses have ended, too.
        """


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """Settings of a sampler besides its section of the spec."""

    weights_dir: Path
    """A transformers model directory: config, safetensors and tokenizer."""
    device: torch.device
    """Where to sample."""
    max_length: int
    """Tokens of prompt and response together at most."""
    seed: int
    """The sampler's own; what is drawn depends on the seeds given to `generate` alone."""
    learner_model: "PreTrainedModel | None" = None
    """The learner's own module, for a sampler that can read it; None: it needs weights of its own."""
    beside_learner: bool = False
    """Whether a learner in this process needs the GPU's memory while the sampler does not sample."""
    precision: Literal["float32", "bfloat16"] | None = None
    """The learner's precision, for a sampler that runs a transformers model of its own; None: float32 on a CPU, else
    the precision of the weights."""


def response_limits(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    limits: Sequence[int] | None,
    *,
    max_length: int,
) -> list[int]:
    """Response tokens of each prompt at most: what is asked for, or what room the prompt leaves.

    Raises:
        ValueError: a prompt is empty, leaves no room for a response, or has no seed or no limit of its own.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds; one each is needed")
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < max_length:
            allowed = f"1 to {max_length - 1} leave room for a response"
            raise ValueError(f"prompt {index} has {len(prompt)} tokens; {allowed}")
    most = [sampling.max_response_length] * len(prompts) if limits is None else limits
    if len(most) != len(prompts) or min(most, default=1) < 1:
        raise ValueError(f"limits {list(most)} of {len(prompts)} prompts; one each of at least 1 is needed")
    return [min(limit, max_length - len(prompt)) for prompt, limit in zip(prompts, most, strict=True)]
