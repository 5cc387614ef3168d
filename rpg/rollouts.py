"""Where a step's rollouts come from: prompts taken in their order, sampled in groups, scored, shared by all ranks."""

import numpy as np

from rpg import ranks
from rpg.batch import StepRollouts, collate, join
from rpg.parts import Parts
from rpg.prompts import seed_of
from rpg.stopwatch import Stopwatch
from rpg.types import Sampling


class RolloutSource:
    """Makes one batch of rollouts after another. All ranks make the same calls and get the same batch."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._training = parts.spec.training
        rollout = parts.spec.rollout
        self._sampling = Sampling(rollout.temperature, 1.0, rollout.max_response_length)

    def take(self, step: int, clock: Stopwatch) -> StepRollouts:
        """This rank samples and scores the responses to its share of the prompts, then all ranks get all of them.

        A prompt's seed follows from the run's seed, the step and the prompt's place in it, so the responses do not
        depend on the number of ranks.
        """
        indices = self._parts.order.take(self._training.prompts_per_step)
        mine = np.array_split(np.arange(len(indices)), ranks.world_size())[ranks.rank()]
        problems = [indices[place] for place in mine]
        with clock("rollout"):
            groups = self._parts.sampler.generate(
                [self._parts.prompts[problem] for problem in problems],
                group_size=self._training.group_size,
                sampling=self._sampling,
                seeds=[seed_of(self._parts.seed, step, int(place)) for place in mine],
            )
        with clock("reward"):
            responses = self._parts.tokenizer.batch_decode(
                [list(rollout.response_ids) for group in groups for rollout in group.rollouts],
                skip_special_tokens=True,
            )
            asked = [self._parts.problems[problem] for problem in problems for _ in range(self._training.group_size)]
            scores = self._parts.scorer.score(asked, responses)
        return join(ranks.gather(collate(groups, problems=problems, responses=responses, scores=scores)))
