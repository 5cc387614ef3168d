"""Where a step's rollouts come from: prompts taken in their order, sampled in groups, scored, shared by all ranks."""

from dataclasses import replace

import numpy as np
import torch

from rpg import ranks
from rpg.advantages import overlong_penalties
from rpg.batch import StepRollouts, collate, join
from rpg.parts import Parts
from rpg.prompts import seed_of
from rpg.refill import refill
from rpg.rewards import Score
from rpg.stopwatch import Stopwatch
from rpg.types import Rollout, Sampling


class RolloutSource:
    """Makes one batch of rollouts after another. All ranks make the same calls and get the same batch."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._training = parts.spec.training
        rollout = parts.spec.rollout
        self._sampling = Sampling(
            rollout.temperature, rollout.top_p, rollout.max_response_length, rollout.top_k, rollout.stop
        )
        self._dynamic = rollout.dynamic_sampling

    def take(self, step: int, clock: Stopwatch) -> StepRollouts:
        """The batch of a step, refilled until every group's scores vary where the spec asks for it."""

        def sample(taken: int, count: int) -> StepRollouts:
            share = self._share(step, taken, count, clock)
            return join([part for part in ranks.gather(share) if part])

        if self._dynamic is None:
            return sample(0, self._training.prompts_per_step)
        return refill(sample, groups=self._training.prompts_per_step, max_batches=self._dynamic.max_batches)

    def _share(self, step: int, taken: int, count: int, clock: Stopwatch) -> StepRollouts | None:
        """Takes the next `count` prompts of the step; samples and scores those of this rank, if there are any.

        A prompt's seed follows from the run's seed, the step and the prompt's place in it, so the responses do not
        depend on the number of ranks.
        """
        indices = self._parts.order.take(count)
        mine = np.array_split(np.arange(count), ranks.world_size())[ranks.rank()]
        if not len(mine):
            return None
        problems = [indices[place] for place in mine]
        with clock("rollout"):
            groups = self._parts.sampler.generate(
                [self._parts.prompts[problem] for problem in problems],
                group_size=self._training.group_size,
                sampling=self._sampling,
                seeds=[seed_of(self._parts.seed, step, taken + int(place)) for place in mine],
            )
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        with clock("reward"):
            responses = self._parts.tokenizer.batch_decode(
                [list(rollout.response_ids) for rollout in rollouts], skip_special_tokens=True
            )
            asked = [self._parts.problems[problem] for problem in problems for _ in range(self._training.group_size)]
            scores = self._penalized(self._parts.scorer.score(asked, responses), rollouts)
        return collate(groups, problems=problems, responses=responses, scores=scores)

    def _penalized(self, scores: list[Score], rollouts: list[Rollout]) -> list[Score]:
        """The scores less what the spec takes off for length."""
        overlong = self._parts.spec.reward.overlong
        if overlong is None:
            return scores
        penalties = overlong.penalty * overlong_penalties(
            torch.tensor([len(rollout.response_ids) for rollout in rollouts]),
            max_response_length=self._sampling.max_response_length,
            buffer=overlong.buffer,
        )
        return [replace(score, penalty=penalty) for score, penalty in zip(scores, penalties.tolist(), strict=True)]
