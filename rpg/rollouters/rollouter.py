"""Rollouters carry a policy through its environment: prompts and a sampler in, finished rollouts out."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rpg.rollouters.journal import PromptJournal, Unkept
from rpg.types import Admit, OnResponse, Problem, Rollout, RolloutGroup, Sampling
from specs.schema.rollout import RollouterSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rpg.samplers.base import Sampler


@dataclass(frozen=True, slots=True)
class SeededPrompt:
    """A prompt to roll out."""

    problem: Problem
    """What it asks; an environment may answer by the gold answer and the metadata. A process that runs what the policy
    says is to be given `problem.public()`."""
    token_ids: tuple[int, ...]
    seed: int
    """All that is random in its rollouts follows from it."""
    journal: PromptJournal | Unkept = field(default=Unkept(), compare=False, repr=False)
    """Where it keeps what its environment said and might say otherwise another time."""

    def seed_of_turn(self, member: int, turn: int) -> int:
        """A seed for a later turn of the `member`-th rollout to this prompt, unrelated to all others."""
        from rpg.data.order import seed_of

        return seed_of(self.seed, member, turn)


class Rollouter(RollouterSection):
    """An environment: it has the sampler draw the policy's turns, and gives the turns that are not the policy's.

    Its fields are the options that a spec may set; like a spec they never change.
    """

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[SeededPrompt],
        sampler: "Sampler",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        group_size: int,
        sampling: Sampling,
        on_response: OnResponse | None = None,
    ) -> list[RolloutGroup]:
        """`group_size` finished rollouts to each prompt, in the order of the prompts.

        What comes out follows from the arguments alone, and the rollouts to a prompt from that prompt and the sampler's
        weights, whatever else is in the call, as far as the engine's arithmetic allows. So a run that was killed goes
        on as if it had not been, and any number of ranks samples the same. With `rollout.max_staleness` the call is
        made in a thread beside training.

        Args:
            prompts: with their problems and seeds.
            sampler: draws the policy's turns, as often as it is asked to, in the thread of this call. Its weights stay
                the same during the call; its `policy_version` is that of the groups.
            tokenizer: the policy's, for the text of given turns.
            group_size: rollouts per prompt.
            sampling: how the policy's turns are drawn. `max_response_length` bounds a whole response, given tokens
                included; the model's context has room for so long a response to any of the prompts.
            on_response: called in this thread as rollouts end, each once, in any order, before this returns: they are
                scored while others are still sampled. What it raises ends the call.
        Raises:
            Exception: ends the run. Where a tool fails on one response, a given turn can tell the policy so, or the
                response can end.
        """

    def stream(
        self,
        prompts: Sequence[SeededPrompt],
        sampler: "Sampler",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        group_size: int,
        sampling: Sampling,
        admit: Admit,
        on_response: OnResponse,
    ) -> int:
        """Rolls out as `generate` does, beginning prompts as `admit` allows, until that ends the call.

        Here each call of `generate` takes all prompts that were admitted, and the next ones are asked for when it has
        ended: right for any environment. One that can let a prompt begin while others are under way overrides this.

        Args:
            prompts: all that may be admitted, in the order in which they begin; none on a rank that shares the sampler
                of another, which asks `admit` with the others until the end.
            admit: asked whenever nothing is under way, and meanwhile as often as `Sampler.stream` asks.
            on_response: see `generate`. Not called for a rollout that is under way at the end.
        Returns:
            Sampled tokens of the rollouts that were under way at the end.
        """
        begun = 0
        reported: set[int] = set()

        def ended(index: int, rollout: Rollout) -> None:
            reported.add(begun * group_size + index)
            on_response(begun * group_size + index, rollout)

        while (admitted := admit()) is not None:
            if admitted == begun:  # other ranks are not done
                continue
            part = prompts[begun:admitted]
            groups = self.generate(
                part, sampler, tokenizer, group_size=group_size, sampling=sampling, on_response=ended
            )
            check_rollouts(groups, part, group_size=group_size, sampling=sampling)
            begun = admitted
            if missing := set(range(begun * group_size)) - reported:
                raise ValueError(f"the rollouter did not call on_response for response {min(missing)}")
        return 0


def check_rollouts(
    groups: Sequence[RolloutGroup], prompts: Sequence[SeededPrompt], *, group_size: int, sampling: Sampling
) -> None:
    """Raises ValueError where a rollouter has not returned what it was asked for, before anything is trained on it."""
    if [group.prompt_ids for group in groups] != [prompt.token_ids for prompt in prompts]:
        raise ValueError(
            f"the rollouter returned {len(groups)} groups that are not those of the {len(prompts)} prompts"
        )
    for index, group in enumerate(groups):
        if len(group.rollouts) != group_size:
            raise ValueError(
                f"the rollouter returned {len(group.rollouts)} rollouts to prompt {index}, not {group_size}"
            )
        longest = max(rollout.length for rollout in group.rollouts)
        if longest > sampling.max_response_length:
            raise ValueError(
                f"the rollouter returned a response of {longest} tokens to prompt {index}, given tokens included;"
                f" at most {sampling.max_response_length} are allowed"
            )
