"""An environment of two turns: the policy answers, is asked to check its answer, and answers again."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from rpg.rollouters import OnResponse, Rollout, Rollouter, RolloutGroup, Sampling, SeededPrompt, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rpg.samplers.base import Sampler


class CheckAgain(Rollouter):
    """Lets the policy answer twice, with a question of the environment's between; the second answer is scored."""

    question: str = Field("check again: ", min_length=1)
    """Text that the policy gets after its first answer."""

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
        """See Rollouter. The first answer gets at most half of the room that the question leaves."""
        question = Turn(tuple(tokenizer.encode(self.question, add_special_tokens=False)))
        room = sampling.max_response_length - len(question.token_ids)
        groups = sampler.generate(
            [prompt.token_ids for prompt in prompts],
            group_size=group_size,
            sampling=sampling,
            seeds=[prompt.seed for prompt in prompts],
            limits=[room // 2] * len(prompts),
        )
        begun = [(rollout.turns[0], question) for group in groups for rollout in group.rollouts]
        owners = [(prompt, member) for prompt in prompts for member in range(group_size)]

        def whole(index: int, answer: Rollout) -> Rollout:
            return Rollout((*begun[index], *answer.turns), answer.finish_reason)

        def ended(index: int, answer: Rollout) -> None:
            if on_response:
                on_response(index, whole(index, answer))

        answers = sampler.generate(
            [
                prompt.token_ids + first.token_ids + question.token_ids
                for (prompt, _), (first, question) in zip(owners, begun, strict=True)
            ],
            group_size=1,
            sampling=sampling,
            seeds=[prompt.seed_of_turn(member, 1) for prompt, member in owners],
            limits=[room - len(first.token_ids) for first, _ in begun],
            on_response=ended,
        )
        rollouts = [whole(index, answer.rollouts[0]) for index, answer in enumerate(answers)]
        return [
            RolloutGroup(prompt.token_ids, tuple(rollouts[at : at + group_size]), sampler.policy_version)
            for prompt, at in zip(prompts, range(0, len(rollouts), group_size), strict=True)
        ]
