"""Dynamic sampling as a stream: groups are judged as they end, and others begin while the rest are under way.

When a group is judged, and when another begins, is counted in decoding steps and not in time. The sampler asks how many
prompts may begin after every ADMISSION_STEPS decoding steps (`rpg/samplers/base.py`). At that point, on every rank:

1. The scores of the groups that have ended since are waited for, and told to all ranks.
2. If the groups that rounds would have kept are among those judged, the stream ends.
3. Else prompts begin, in their order, until `oversampling` times as many groups are undecided as are missing.

So what is decoded together with what follows from the lengths of the responses and from their scores. Therefore:

- A step that is sampled again, after a kill, is the same in every bit. Nothing of a stream outlives its step: the
  prompts begun beyond the last one that the step needed are taken again by the next step, under the weights of then.
- The batch is that of rounds, and so the same on any number of ranks, with any oversampling and any `max_concurrent`:
  prompt p has its own seed, and the groups taken are the first, in the order of the prompts, whose scores differ. As
  always the company of other responses may change the last bits of a logprob.
- What is thrown away does depend on the number of ranks, where one has fewer slots than responses to sample.

Prompt p of a step is sampled by the (p mod R)-th of R ranks that have a sampler, so that they end at about the same
time.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rpg.rewards.score import scores_vary
from rpg.rollouters.scoring import Scoring
from rpg.stopwatch import Stopwatch
from rpg.types import Rollout


class Admission:
    """How many of a step's prompts may begin, by what is known of those that have ended. All ranks know the same."""

    def __init__(self, *, groups: int, max_batches: int, oversampling: float) -> None:
        """
        Args:
            groups: of a step.
            max_batches: rounds that the step's prompts would fill at most.
            oversampling: undecided groups at most, for each group that is missing.
        """
        self.most = groups * max_batches
        """Prompts that can be needed."""
        self.begun = 0
        """Prompts that may have begun."""
        self._groups, self._max_batches, self._oversampling = groups, max_batches, oversampling
        self._varies: dict[int, bool] = {}
        """Whether the scores differ, for each prompt whose group has ended."""

    def judge(self, varies: Mapping[int, bool]) -> int | None:
        """Takes in which groups have ended. Returns how many prompts may begin; None: the step has its groups."""
        self._varies |= varies
        if self.needed is not None:
            return None
        missing = max(0, self._groups - sum(self._varies.values()))
        undecided = math.ceil(self._oversampling * missing)
        self.begun = min(self.most, max(self.begun, len(self._varies) + undecided))
        return self.begun

    @property
    def needed(self) -> int | None:
        """Prompts that rounds would have taken; None while that depends on one that has not ended."""
        taken = kept = 0
        for _ in range(self._max_batches):
            batch = range(taken, taken + self._groups - kept)
            if any(place not in self._varies for place in batch):
                return None
            kept += sum(self._varies[place] for place in batch)
            taken = batch.stop
        return taken


class RankStream:
    """One rank's responses of a streamed step: it has them scored, judges their groups, and asks all ranks together how
    many of its prompts may begin."""

    def __init__(
        self,
        admission: Admission,
        places: Sequence[int],
        scoring: Scoring,
        *,
        group_size: int,
        exchange: Callable[[Callable[[], dict[int, bool]]], list[dict[int, bool]]],
        clock: Stopwatch,
        by_term: bool = False,
    ) -> None:
        """
        Args:
            admission: the step's.
            places: of this rank's prompts in the step, ascending.
            scoring: of the responses to these prompts.
            group_size: responses to each prompt.
            exchange: gathers what each rank makes, see `ranks.Exchange`.
            clock: of the step.
            by_term: see `scores_vary`.
        """
        self._by_term = by_term
        self._rollouts: dict[int, Rollout] = {}
        """The responses that have ended: the i-th to the g-th of the places is g * group_size + i."""
        self._clock = clock
        self._admission, self._places, self._scoring = admission, places, scoring
        self._group_size, self._exchange = group_size, exchange
        self._ended: list[int] = []
        """Groups that have ended since the ranks last exchanged what they know."""
        self._left = [group_size] * len(places)
        """Responses of each group that have not ended."""

    def ended(self, index: int, rollout: Rollout) -> None:
        """Has a response scored."""
        self._rollouts[index] = rollout
        with self._clock("reward", on_host=True):  # once a response: the engine's next tokens are under way
            self._scoring.begin(index, rollout)
        group = index // self._group_size
        self._left[group] -= 1
        if not self._left[group]:
            self._ended.append(group)

    def admit(self) -> int | None:
        """How many of this rank's prompts may begin; None: the step has its groups. All ranks ask together."""
        known = {place: varies for share in self._exchange(self._judge) for place, varies in share.items()}
        begun = self._admission.judge(known)
        return None if begun is None else int(np.searchsorted(self._places, begun))

    def group(self, group: int) -> tuple[Rollout, ...]:
        """The responses of a group that has ended."""
        return tuple(self._rollouts[index] for index in self._responses(group))

    def sampled_tokens(self, *, after: int) -> int:
        """Sampled tokens of the ended responses of all groups but the first `after`."""
        later = (rollout for index, rollout in self._rollouts.items() if index >= after * self._group_size)
        return sum(len(rollout.rollout_logprobs) for rollout in later)

    def _responses(self, group: int) -> range:
        return range(group * self._group_size, (group + 1) * self._group_size)

    def _judge(self) -> dict[int, bool]:
        with self._clock("reward", on_host=True):
            scores = {group: [self._scoring.score(index) for index in self._responses(group)] for group in self._ended}
        self._ended.clear()
        return {self._places[group]: scores_vary(of, by_term=self._by_term) for group, of in scores.items()}
