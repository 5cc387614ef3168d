"""Dynamic sampling as a stream: each group is judged when it ends, and others start while the rest still run.

The points at which groups are judged and others start are counted in decoding steps, not in time. The sampler asks how
many prompts may start after every ADMISSION_STEPS decoding steps (`rpg/samplers/base.py`). At that point, on every
rank:

1. It waits for the scores of the groups that have ended since, and sends them to all ranks.
2. If the groups that rounds would have kept are among those judged, the stream ends.
3. Otherwise prompts start, in their order, until `oversampling` times as many groups are undecided as are missing.

So the lengths of the responses and their scores alone decide which responses are decoded together. Therefore:

- A step that is sampled again, after a kill, is the same in every bit. Nothing of a stream outlives its step: prompts
  started beyond the last one that the step needed are sampled again in the next step, under its weights.
- The batch equals that of rounds, on any number of ranks, with any oversampling and any `max_concurrent`: prompt p has
  its own seed, and the groups kept are the first, in the order of the prompts, whose scores differ. As always, the
  other responses in a decoding batch may change the last bits of a logprob.
- The dropped groups depend on the number of ranks if a rank has fewer slots than responses to sample.

Prompt p of a step is sampled by the rank that has the (p mod N)-th of all N samplers, so that they end at about the
same time.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rpg.rewards.score import scores_vary
from rpg.rollouters.scoring import Scoring
from rpg.stopwatch import Stopwatch
from rpg.types import Rollout


class Admission:
    """Decides how many of a step's prompts may start, given the groups that have ended. All ranks have the same
    state."""

    def __init__(self, *, groups: int, max_batches: int, oversampling: float) -> None:
        """Takes the bounds.

        Args:
            groups: number of groups of a step.
            max_batches: most rounds that the step's prompts would fill.
            oversampling: most undecided groups for each missing group.
        """
        self.most = groups * max_batches
        """Largest number of prompts that may be needed."""
        self.begun = 0
        """Number of prompts that were allowed to start."""
        self._groups, self._max_batches, self._oversampling = groups, max_batches, oversampling
        self._varies: dict[int, bool] = {}
        """Prompt whose group has ended -> whether its scores differ."""

    def judge(self, varies: Mapping[int, bool]) -> int | None:
        """Records the groups that have ended. Returns how many prompts may start; None if the step has enough
        groups."""
        self._varies |= varies
        if self.needed is not None:
            return None
        missing = max(0, self._groups - sum(self._varies.values()))
        undecided = math.ceil(self._oversampling * missing)
        self.begun = min(self.most, max(self.begun, len(self._varies) + undecided))
        return self.begun

    @property
    def needed(self) -> int | None:
        """Returns how many prompts sampling in rounds would have used; None while that depends on a group that has not
        ended."""
        taken = kept = 0
        for _ in range(self._max_batches):
            batch = range(taken, taken + self._groups - kept)
            if any(place not in self._varies for place in batch):
                return None
            kept += sum(self._varies[place] for place in batch)
            taken = batch.stop
        return taken


class RankStream:
    """One rank's responses of a streamed step. It starts their scoring, judges their groups and, together with all
    ranks, determines how many of its prompts may start."""

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
        """Takes the rank's share.

        Args:
            admission: the step's admission.
            places: indices of this rank's prompts in the step, ascending.
            scoring: the scoring of the responses to these prompts.
            group_size: number of responses to each prompt.
            exchange: gathers the value that each rank makes, see `ranks.Exchange`.
            clock: clock of the step.
            by_term: see `scores_vary`.
        """
        self._by_term = by_term
        self._rollouts: dict[int, Rollout] = {}
        """Responses that have ended. Response i to the prompt with index g in `places` has the key g * group_size +
        i."""
        self._clock = clock
        self._admission, self._places, self._scoring = admission, places, scoring
        self._group_size, self._exchange = group_size, exchange
        self._ended: list[int] = []
        """Groups that have ended since the last exchange between ranks."""
        self._left = [group_size] * len(places)
        """Number of responses of each group that have not ended."""

    def ended(self, index: int, rollout: Rollout) -> None:
        """Starts to score a response."""
        self._rollouts[index] = rollout
        with self._clock("reward", on_host=True):  # called per response while the engine computes the next tokens
            self._scoring.begin(index, rollout)
        group = index // self._group_size
        self._left[group] -= 1
        if not self._left[group]:
            self._ended.append(group)

    def admit(self) -> int | None:
        """Returns how many of this rank's prompts may start; None if the step has enough groups. All ranks call it
        together."""
        known = {place: varies for share in self._exchange(self._judge) for place, varies in share.items()}
        begun = self._admission.judge(known)
        return None if begun is None else int(np.searchsorted(self._places, begun))

    def group(self, group: int) -> tuple[Rollout, ...]:
        """Returns the responses of a group that has ended."""
        return tuple(self._rollouts[index] for index in self._responses(group))

    def sampled_tokens(self, *, after: int) -> int:
        """Returns the number of sampled tokens in the ended responses of all groups from index `after` on."""
        later = (rollout for index, rollout in self._rollouts.items() if index >= after * self._group_size)
        return sum(len(rollout.rollout_logprobs) for rollout in later)

    def _responses(self, group: int) -> range:
        return range(group * self._group_size, (group + 1) * self._group_size)

    def _judge(self) -> dict[int, bool]:
        with self._clock("reward", on_host=True):
            scores = {group: [self._scoring.score(index) for index in self._responses(group)] for group in self._ended}
        self._ended.clear()
        return {self._places[group]: scores_vary(of, by_term=self._by_term) for group, of in scores.items()}
