"""A dedicated engine that several ranks of a machine share: its host, which holds it, and the host's guests.

Prompts are dealt to hosts alone (`rpg/samplers/sampling_ranks.py`). A guest takes part in what all ranks do together:
the gathering of weights, the exchanges of a stream, the proof that the engine holds the learner's weights.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from rpg.processes import ranks
from rpg.samplers.vllm.dedicated import DedicatedSampler
from rpg.samplers.vllm.engine import EngineSettings
from rpg.samplers.vllm.weight_transfer import open_guests_transfer
from rpg.types import Admit, NextTurns, RolloutGroup
from specs.errors import Issue, SpecError


class HostSampler(DedicatedSampler):
    """The engine, on the rank that holds it."""

    def logprobs(self, token_ids: Sequence[int], *, prompt_length: int, temperature: float = 1.0) -> list[float]:
        """See DedicatedSampler. All ranks call it, and the guests get what the engine says."""
        engine = super().logprobs
        return _from_host(lambda: engine(token_ids, prompt_length=prompt_length, temperature=temperature))


class GuestSampler:
    """The engine, on a rank that shares another's. It is given no prompts."""

    def __init__(self, settings: EngineSettings) -> None:
        """`settings`: of the engine."""
        self.policy_version = 0
        self._transfer = open_guests_transfer(settings)

    def generate(self, prompts: Sequence[Sequence[int]], **_: Any) -> list[RolloutGroup]:
        """No groups for no prompts."""
        assert not prompts
        return []

    def stream(self, prompts: Sequence[Sequence[int]], *, admit: Admit, **_: Any) -> int:
        """Asks with the ranks that sample, each time, until that ends the call. No token is under way at the end."""
        assert not prompts
        while admit() is not None:
            pass
        return 0

    def serve(self, next_turns: NextTurns, **_: Any) -> int:
        """Asks until that ends the call. There are no turns."""
        while (turns := next_turns("idle")) is not None:
            assert not turns
        return 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Takes part in what the host sends."""
        self._transfer.send(weights, policy_version)
        self.policy_version = policy_version

    def logprobs(self, token_ids: Sequence[int], **_: Any) -> list[float]:  # noqa: ARG002  # the host asks the engine
        """Logprobs that the engine gives its host. All ranks call it."""
        return _from_host(lambda: None)

    def forget(self) -> None:
        """The host's to do."""

    def sleep(self) -> None:
        """The engine's memory is its own."""

    def close(self) -> None:
        """Frees what the transfer holds. The engine is the host's to end."""
        self._transfer.close()


def opened_on_all_ranks(make: Callable[[], HostSampler | GuestSampler]) -> HostSampler | GuestSampler:
    """Opens `make` on this rank, and waits until all have opened theirs. Else guests would wait in vain for their host.

    Raises:
        SpecError: what `make` raised, on this rank or another.
        RuntimeError: it failed otherwise on another rank.
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
    """The logprobs of this rank's engine: a host's are its own, a guest has none and gets those of the last host before
    it."""
    of_ranks = ranks.gather_made(logprobs, what="logprobs of the probe")
    return next(each for each in reversed(of_ranks[: ranks.rank() + 1]) if each is not None)
