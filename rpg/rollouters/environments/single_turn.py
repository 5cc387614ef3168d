"""The environment with a single turn, which gives no text to the policy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rpg.rollouters.rollouter import Rollouter, SeededPrompt
from rpg.types import Admit, OnResponse, RolloutGroup, Sampling
from specs.schema.rollout import TurnBounds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rpg.samplers.base import Sampler


class SingleTurn(Rollouter):
    """A single turn: the response is the text that the policy samples."""

    @property
    def gives_tokens(self) -> bool:
        """See RollouterSection."""
        return False

    @property
    def rewards_turns(self) -> bool:
        """See RollouterSection."""
        return False

    def bounds(self, max_response_length: int) -> TurnBounds:
        """See RollouterSection."""
        return TurnBounds(turns=1, sampled=max_response_length, given=0, length=max_response_length)

    def generate(
        self,
        prompts: Sequence[SeededPrompt],
        sampler: "Sampler",
        tokenizer: "PreTrainedTokenizerBase",  # noqa: ARG002  # it gives no turn
        *,
        group_size: int,
        sampling: Sampling,
        on_response: OnResponse | None = None,
    ) -> list[RolloutGroup]:
        """See Rollouter."""
        return sampler.generate(
            [prompt.token_ids for prompt in prompts],
            group_size=group_size,
            sampling=sampling,
            seeds=[prompt.seed for prompt in prompts],
            on_response=on_response,
        )

    def stream(
        self,
        prompts: Sequence[SeededPrompt],
        sampler: "Sampler",
        tokenizer: "PreTrainedTokenizerBase",  # noqa: ARG002  # it gives no turn
        *,
        group_size: int,
        sampling: Sampling,
        admit: Admit,
        on_response: OnResponse,
    ) -> int:
        """See Rollouter. Prompts begin while others are still being sampled."""
        return sampler.stream(
            [prompt.token_ids for prompt in prompts],
            group_size=group_size,
            sampling=sampling,
            seeds=[prompt.seed for prompt in prompts],
            admit=admit,
            on_response=on_response,
        )
