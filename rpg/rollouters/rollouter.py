"""The interface of rollouters, which run a policy in an environment: they turn prompts into finished rollouts with a
sampler."""

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
    """A prompt for rollouts, with its seed."""

    problem: Problem
    """Problem of the prompt. An environment may use the gold answer and the metadata for its answers. A process that
    runs text of the policy must get `problem.public()`."""
    token_ids: tuple[int, ...]
    seed: int
    """Seed of all randomness in its rollouts."""
    journal: PromptJournal | Unkept = field(default=Unkept(), compare=False, repr=False)
    """Journal of the environment's answers, which might be different another time."""

    def seed_of_turn(self, member: int, turn: int) -> int:
        """Returns a seed for a later turn of the `member`-th rollout to this prompt, unrelated to all others."""
        from rpg.data.order import seed_of

        return seed_of(self.seed, member, turn)


class Rollouter(RollouterSection):
    """An environment. It lets the sampler draw the policy's turns, and provides the other turns itself.

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
        """Returns `group_size` finished rollouts to each prompt, in the order of the prompts.

        The result depends on the arguments alone. The rollouts to a prompt depend only on that prompt and the sampler's
        weights, and not on the rest of the call, as far as the engine's arithmetic allows. So a killed run resumes with
        the same results, and any number of ranks samples the same. With `rollout.max_staleness` the call runs in a
        thread beside training.

        Args:
            prompts: the prompts, with their problems and seeds.
            sampler: samples the policy's turns, any number of times, in the thread of this call. Its weights do not
                change during the call; its `policy_version` is that of the groups.
            tokenizer: the policy's tokenizer, for the text of given turns.
            group_size: rollouts per prompt.
            sampling: sampling settings of the policy's turns. `max_response_length` bounds a whole response, given
                tokens included; the model's context has room for a response of this length to any of the prompts.
            on_response: called in this thread once for each rollout that ends, in any order, before this returns, so
                that it is scored while others are still sampled. An exception in it ends the call.
        Raises:
            Exception: ends the run. If a tool fails on one response, a given turn can report that to the policy, or the
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
        """Rolls out like `generate`, but starts prompts as `admit` allows, until `admit` ends the call.

        This default calls `generate` with all admitted prompts and asks for more when it has ended, which is right for
        any environment. An environment that can start a prompt while others are running overrides it.

        Args:
            prompts: all prompts that may be admitted, in the order in which they start. Empty on a rank that shares the
                sampler of another rank; it calls `admit` together with the others until the end.
            admit: called whenever nothing is running, and otherwise as often as `Sampler.stream` calls it.
            on_response: see `generate`. Not called for a rollout that is unfinished at the end.
        Returns:
            Sampled tokens of the rollouts that were unfinished at the end.
        """
        begun = 0
        reported: set[int] = set()

        def ended(index: int, rollout: Rollout) -> None:
            reported.add(begun * group_size + index)
            on_response(begun * group_size + index, rollout)

        while (admitted := admit()) is not None:
            if admitted == begun:  # other ranks are still running
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
    """Raises ValueError if a rollouter has not returned the requested rollouts. Call it before training uses the
    groups."""
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
