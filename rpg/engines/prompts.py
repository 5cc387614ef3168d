"""What every engine asks of the prompts."""

from collections.abc import Sequence

from rpg.types import Sampling


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
