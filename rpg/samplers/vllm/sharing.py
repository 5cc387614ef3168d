"""Dedicated engines that several ranks of a machine share. The host is the rank that holds the engine; the others are
its guests.

Only hosts get prompts (`rpg/samplers/sampling_ranks.py`). A guest takes part in the work that all ranks do together:
the gathering of weights, the exchanges of a stream, the check that the engine holds the learner's weights.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from rpg.processes import ranks
from rpg.samplers.vllm.dedicated import DedicatedSampler
from rpg.samplers.vllm.engine import AnyEngineSettings
from rpg.samplers.vllm.weight_transfer import open_guests_transfer
from rpg.types import Admit, NextTurns, RolloutGroup
from specs.errors import Issue, SpecError


class HostSampler(DedicatedSampler):
    """The engine, on the rank that holds it."""

    def logprobs(
        self, token_ids: Sequence[int], *, prompt_length: int, temperature: float = 1.0, engine: int = 0
    ) -> list[float]:
        """See DedicatedSampler. All ranks call it. The guests get the engine's result."""
        ask = super().logprobs
        return _from_host(lambda: ask(token_ids, prompt_length=prompt_length, temperature=temperature, engine=engine))


class GuestSampler:
    """The sampler of a rank that shares another rank's engine. It gets no prompts."""

    engines = 1

    def __init__(self, settings: AnyEngineSettings) -> None:
        """Args: the engine's settings."""
        self.policy_version = 0
        self._transfer = open_guests_transfer(settings)

    def generate(self, prompts: Sequence[Sequence[int]], **_: Any) -> list[RolloutGroup]:
        """Returns no groups, because it gets no prompts."""
        assert not prompts
        return []

    def stream(self, prompts: Sequence[Sequence[int]], *, admit: Admit, **_: Any) -> int:
        """Calls `admit`, together with the ranks that sample, until it ends the call. Returns 0, the number of tokens
        of unfinished responses."""
        assert not prompts
        while admit() is not None:
            pass
        return 0

    def serve(self, next_turns: NextTurns, **_: Any) -> int:
        """Calls `next_turns` until it ends the call. There are no turns on this rank."""
        while (turns := next_turns("idle")) is not None:
            assert not turns
        return 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Takes part in the host's transfer."""
        self._transfer.send(weights, policy_version)
        self.policy_version = policy_version

    def logprobs(self, token_ids: Sequence[int], **_: Any) -> list[float]:  # noqa: ARG002  # the host asks the engine
        """Returns the logprobs that the engine gives its host. All ranks call it."""
        return _from_host(lambda: None)

    def forget(self) -> None:
        """Does nothing, because the host does it."""

    def sleep(self) -> None:
        """Does nothing, because the engine's memory is separate."""

    def close(self) -> None:
        """Frees the transfer's resources. The host ends the engine."""
        self._transfer.close()


def opened_on_all_ranks(make: Callable[[], HostSampler | GuestSampler]) -> HostSampler | GuestSampler:
    """Calls `make` on this rank, and waits until all ranks have done so. Otherwise guests would wait forever for a
    failed host.

    Raises:
        SpecError: `make` raised it, on this rank or another.
        RuntimeError: `make` failed with another error on another rank.
    """
    refused: list[Issue] = []

    def opened() -> HostSampler | GuestSampler | None:
        try:
            return make()
        except SpecError as error:
            refused.extend(error.issues)
            return None

    of_ranks = ranks.gather_made(lambda: (opened(), refused), what="engine", for_others=lambda made: (None, made[1]))
    sampler, _ = of_ranks[ranks.rank()]
    issues = dict.fromkeys(issue for _, of_rank in of_ranks for issue in of_rank)
    if issues and sampler:
        sampler.close()
    if issues or not sampler:
        raise SpecError(*issues)
    return sampler


def _from_host(logprobs: Callable[[], list[float] | None]) -> list[float]:
    """Returns the logprobs of this rank's engine. A host has its own; a guest gets those of the last host before it."""
    of_ranks = ranks.gather_made(logprobs, what="logprobs of the probe")
    return next(each for each in reversed(of_ranks[: ranks.rank() + 1]) if each is not None)
