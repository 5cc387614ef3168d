"""The two sides of the loop: what samples and what learns."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from rpg.types import OnResponse, RolloutGroup, Sampling


class Sampler(Protocol):
    """Draws responses from a policy whose weights it is given. Any thread may use it, one at a time."""

    policy_version: int
    """Number of weight loads so far."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        sampling: Sampling,
        seeds: Sequence[int],
        on_response: OnResponse | None = None,
    ) -> list[RolloutGroup]:
        """`group_size` responses to each prompt, in the order of the prompts.

        Args:
            prompts: token ids of each prompt.
            group_size: responses per prompt; the prompt is computed once.
            sampling: temperature, top_p, top_k, what ends a response.
            seeds: one per prompt; the same prompt, seed and weights give the same responses whatever else is in the
                batch, as far as the engine's arithmetic allows.
            on_response: called in this thread as responses end, each once, in any order, before this returns. What it
                raises ends the call.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Takes over the learner's weights, by the names of the transformers model."""
        ...

    def logprobs(self, token_ids: Sequence[int], *, prompt_length: int, temperature: float = 1.0) -> list[float]:
        """Of the tokens after the prompt, under the engine's present weights, nats: the sentinel's probe."""
        ...

    def close(self) -> None:
        """Frees what the engine holds."""
        ...


def check_prompts(prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_length: int) -> None:
    """Raises ValueError where a prompt is empty, leaves no room for a response, or has no seed."""
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds; one each is needed")
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < max_length:
            allowed = f"1 to {max_length - 1} leave room for a response"
            raise ValueError(f"prompt {index} has {len(prompt)} tokens; {allowed}")


def response_limits(prompts: Sequence[Sequence[int]], sampling: Sampling, *, max_length: int) -> list[int]:
    """Response tokens of each prompt at most: what is asked for, or what room the prompt leaves."""
    return [min(sampling.max_response_length, max_length - len(prompt)) for prompt in prompts]
