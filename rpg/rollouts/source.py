"""Source of a step's rollouts. It takes prompts in their order, distributes them over the ranks, samples groups, and
scores them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rpg.advantages import overlong_penalties
from rpg.batches.batch import StepRollouts, collate, join, select
from rpg.batches.packing_plan import Integers
from rpg.batches.shares import without_contents
from rpg.checkpoints.pieces import StateCopy, count_values, load_values
from rpg.components import TrainerComponents
from rpg.data.order import seed_of
from rpg.processes import ranks
from rpg.rewards import Score
from rpg.rewards.score import failures_at_worst
from rpg.rollouters.journal import DIRECTORY, Journal
from rpg.rollouters.rollouter import SeededPrompt, check_rollouts
from rpg.rollouters.scoring import Scoring
from rpg.rollouts.ahead import WAITING, QueuedBatch, SamplingQueue, load_waiting, plain_waiting
from rpg.rollouts.dealing import SeenLengths
from rpg.rollouts.dynamic_sampling import refill
from rpg.rollouts.partial import OPEN, OpenGroup, OpenGroups, PartialSampling
from rpg.rollouts.stream import Admission, RankStream
from rpg.samplers.out_of_memory import memory_of_sampler
from rpg.samplers.sampling_ranks import samplers_of_ranks
from rpg.stopwatch import Stopwatch
from rpg.types import Rollout, RolloutGroup, Sampling
from specs.schema.reward import Overlong
from specs.schema.rollout import DynamicSampling
from specs.schema.schedule import value_at

LENGTHS = "lengths"
"""Stem of the checkpoint file with the lengths of responses."""
ORDER = "order"
"""Stem of the checkpoint file with the success rates of problems, if the prompts' order needs them."""


class RolloutSource:
    """Source of successive batches of rollouts. All ranks make the same calls. Each holds the part of a batch that it
    sampled.

    With `max_staleness` n above 0 the batch of step i is sampled under the weights after step i - 1 - n (in the first
    steps, the initial weights) in a separate thread, while the learner trains. So the weights that sample a batch are
    fixed, whatever the timing.

    A batch whose sampling fails cannot be sampled later. Only the sampler still has the weights that the batch needs,
    because the learner has trained another step at the same time. A run could not resume from a checkpoint of that
    step. So the run ends without writing one, and resumes from the checkpoint before.
    """

    def __init__(self, components: TrainerComponents) -> None:
        self._components = components
        self._training = components.spec.training
        rollout = components.spec.rollout
        self._sampling = Sampling(
            value_at(rollout.temperature, 1),
            rollout.top_p,
            rollout.max_response_length,
            rollout.top_k,
            rollout.stop,
            tells_experts=rollout.replay_routing,
        )
        self._dynamic = rollout.dynamic_sampling
        self._by_term = components.spec.advantage.rewards == "normalized_each"
        self._staleness = rollout.max_staleness
        self._ahead = SamplingQueue(self._make, components.device) if self._staleness else None
        self._gather = ranks.Channel().gather if self._ahead else ranks.gather
        self._position = components.order.position
        self._samplers = samplers_of_ranks(components.spec.sampling)
        self._lengths = SeenLengths(len(components.problems))
        self._seen: Tensor | None = None
        """Lengths seen up to the last batch that was fetched; None if none are known."""
        self._ordered: Tensor | None = None
        """State of the prompts' order after that batch; None if the order has no state."""
        self._journal = Journal(components.run.path / DIRECTORY)
        self._groups = self._open_groups() if rollout.partial else None
        self._opened: dict[str, Any] | None = None
        """State of the open groups after the last batch that was fetched; None without `partial`."""
        self._scorings: dict[int, Scoring] = {}
        """Scoring of each open group of this rank that has ended, by the group's number."""

    def prefetch(self, step: int) -> None:
        """Starts to sample the batches that need the weights after this step. The sampler now has these weights."""
        if self._ahead:
            self._ahead.begin(min(step + 1 + self._staleness, self._training.steps), after=step)

    def wait(self) -> None:
        """Waits until the sampler is idle, so that it can load weights."""
        if self._ahead:
            self._ahead.wait()

    def failure(self) -> BaseException | None:
        """Returns the error of a later step's batch, if one failed. Once the sampler is idle, all ranks get the
        error."""
        return self._ahead.failure() if self._ahead else None

    def next_batch(self, step: int, clock: Stopwatch) -> StepRollouts:
        """Returns the scored batch of a step. This rank holds the responses that it sampled."""
        if self._ahead is None:
            batch = self._make(step, clock)
        else:
            self.prefetch(step - 1)
            with clock("rollout"):
                batch = self._ahead.take(step)
            clock.sampling_took(batch.sampling_seconds)
        self._position, self._seen, self._ordered = batch.position, batch.seen, batch.order
        self._opened = batch.opened
        return batch.rollouts

    def save(self, step: int, copied: StateCopy) -> int:
        """Waits for batches in progress, then copies the batches of later steps, with the lengths and the order's state
        after the last of them. All ranks call it.

        Returns the data cursor that belongs to them: the number of problems used up to the last of them.
        """
        position, seen, ordered, opened = self._position, self._seen, self._ordered, self._opened
        if self._ahead:
            waiting = self._ahead.waiting(step + self._staleness)
            copied.values(WAITING, plain_waiting(waiting))
            if waiting:
                last = waiting[-1]
                position, seen, ordered, opened = last.position, last.seen, last.order, last.opened
        if ranks.world_size() > 1 and ranks.rank() == 0:
            copied.values(LENGTHS, seen)
        if ordered is not None and ranks.rank() == 0:
            copied.values(ORDER, ordered)
        if opened is not None:
            copied.values(OPEN, opened)
        return position

    def load(self, directory: Path, position: int) -> None:
        """Restores the state that `save` copied and returned. Batches for steps after that are dropped."""
        self._seen = load_values(directory, LENGTHS, rank=0)
        self._ordered = load_values(directory, ORDER, rank=0)
        opened = [load_values(directory, OPEN, rank=rank) for rank in range(count_values(directory, OPEN))]
        if self._ahead:
            self._ahead.start_over([])  # nothing is sampled while the state changes
        if self._groups:
            self._groups.restore(opened)
            self._opened = self._groups.state()
            self._scorings.clear()
        if self._ahead:
            waiting = load_waiting(directory, seen=self._seen, order=self._ordered, opened=self._opened)
            self._ahead.start_over(waiting)
        self._lengths.restore(self._seen)
        self._components.order.restore(self._ordered)
        self._position = self._components.order.position = position

    def forget(self, up_to: int) -> None:
        """Deletes the recorded answers of environments up to this step. These steps are never sampled again."""
        self._journal.forget(up_to, delete=ranks.rank() == 0)

    def _make(self, step: int, clock: Stopwatch) -> QueuedBatch:
        """Makes the batch of a step. With dynamic sampling, refills it until every group's scores vary."""
        temperature = value_at(self._components.spec.rollout.temperature, step)
        self._sampling = replace(self._sampling, temperature=temperature)

        def sample(taken: int, count: int) -> StepRollouts:
            problems = self._components.order.take(count)
            places = self._lengths.deal(problems, self._samplers)
            share = partial(self._share, step, taken, problems, places[ranks.rank()], clock)
            shares = ranks.gather_made(share, what="rollouts", gather=self._gather, for_others=_known_to_others)
            return self._together(shares, places)

        groups, surplus_tokens = self._training.prompts_per_step, 0
        if self._groups:
            rollouts = self._continue(step, self._groups, clock)
        elif self._dynamic is None:
            rollouts = sample(0, groups)
        else:
            if self._dynamic.refill == "stream":
                streamed, surplus_tokens = self._stream(step, self._dynamic, clock)
                sample = partial(_next_groups, streamed)
            rollouts = refill(
                sample,
                groups=groups,
                max_batches=self._dynamic.max_batches,
                surplus_tokens=surplus_tokens,
                by_term=self._by_term,
            )
        order = self._components.order
        opened = self._groups.state() if self._groups else None
        return QueuedBatch(
            step, rollouts, order.position, clock.seconds("rollout"), self._lengths.state(), order.state(), opened
        )

    def _open_groups(self) -> OpenGroups:
        """Returns a new, empty list of open groups."""
        size, groups = self._training.group_size, self._training.prompts_per_step
        held = self._components.spec.rollout.max_concurrent * sum(self._samplers) // size
        in_flight = size * max(1, min(groups, held))
        return OpenGroups(groups=groups, group_size=size, in_flight=in_flight, samplers=self._samplers)

    def _continue(self, step: int, open_groups: OpenGroups, clock: Stopwatch) -> StepRollouts:
        """Continues the open groups, and begins others, until enough groups for a step have ended. Returns these."""
        begun = 0

        def begin(on_ranks: Sequence[int]) -> list[OpenGroup]:
            nonlocal begun
            problems = self._components.order.take(len(on_ranks))
            seeds = [seed_of(self._components.seed, step, begun + place) for place in range(len(on_ranks))]
            begun += len(on_ranks)
            return [open_groups.begin(*each) for each in zip(on_ranks, problems, seeds, strict=True)]

        def ended(group: OpenGroup) -> None:
            with clock("reward", on_host=True):  # called while the engine computes the next tokens
                self._begin_scoring(group)

        with ranks.Exchange(what="rollouts", gather=self._gather) as exchange:
            sampling = PartialSampling(
                open_groups,
                self._components.sampler,
                self._sampling,
                prompt=self._components.prompts.__getitem__,
                begin=begin,
                on_group=ended,
                exchange=exchange,
            )
            with clock("rollout"), memory_of_sampler(self._components.spec.rollout, self._components.device):
                taken = sampling.run()
            mine = [group for group in taken if group.responses]
            share = self._ended_groups(mine, clock) if mine else None
            shares = exchange(lambda: share, for_others=_known_to_others)
        places = [
            np.array([place for place, group in enumerate(taken) if group.rank == rank], dtype=np.int64)
            for rank in range(ranks.world_size())
        ]
        batch = self._together(shares, places)
        figures = {
            "partial/continued_fraction": float(np.mean([len(parts) > 1 for parts in batch.versions])),
            "partial/unfinished": float(open_groups.unfinished),
        }
        return replace(batch, figures=figures)

    def _begin_scoring(self, group: OpenGroup) -> Scoring:
        """Starts to score the responses of a group that has ended."""
        self._scorings[group.number] = scoring = self._scoring([self._prompt_of(group)])
        for member, response in enumerate(group.responses):
            scoring.begin(member, response.rollout())
        return scoring

    def _prompt_of(self, group: OpenGroup) -> SeededPrompt:
        prompt = tuple(self._components.prompts[group.problem])
        return SeededPrompt(self._components.problems[group.problem], prompt, group.seed)

    def _ended_groups(self, groups: Sequence[OpenGroup], clock: Stopwatch) -> StepRollouts:
        """Returns this rank's groups that have ended, with their scores."""
        shares = []
        for group in groups:
            # A checkpoint has no scores: after a resume they are computed again.
            scoring = self._scorings.pop(group.number, None) or self._begin_scoring(group)
            prompt, rollouts = self._prompt_of(group), tuple(response.rollout() for response in group.responses)
            whole = RolloutGroup(prompt.token_ids, rollouts, self._components.sampler.policy_version)
            shares.append(self._scored([whole], [prompt], [group.problem], scoring, clock))
            self._scorings.pop(group.number, None)
        return join([share for share in shares if share])

    def _stream(self, step: int, dynamic: DynamicSampling, clock: Stopwatch) -> tuple[StepRollouts, int]:
        """Streams the prompts of a step. Returns the groups that the step uses, in the order of the prompts, and the
        number of tokens that were sampled for other prompts."""
        admission = Admission(
            groups=self._training.prompts_per_step, max_batches=dynamic.max_batches, oversampling=dynamic.oversampling
        )
        order = self._components.order
        before = order.position
        problems = order.take(admission.most)
        with ranks.Exchange(what="rollouts", gather=self._gather) as exchange:
            share = self._streamed_share(step, problems, admission, exchange, clock)
            shares = exchange(lambda: share, for_others=lambda made: (_known_to_others(made[0]), made[1]))
        assert admission.needed is not None
        order.position = before + admission.needed
        places = self._places_in_stream(admission.needed)
        return self._together([share for share, _ in shares], places), sum(tokens for _, tokens in shares)

    def _places_in_stream(self, count: int) -> list[Integers]:
        """Returns the indices that each rank has among this number of streamed prompts, ascending."""
        rank_of = np.repeat(np.arange(len(self._samplers)), self._samplers)
        ranks_of_prompts = np.resize(rank_of, count)
        return [np.flatnonzero(ranks_of_prompts == rank) for rank in range(len(self._samplers))]

    def _together(self, shares: Sequence[StepRollouts | None], places: Sequence[Integers]) -> StepRollouts:
        """Joins the shares of all ranks to one batch in the order of its prompts. Shares of other ranks come without
        prompts.

        Args:
            places: for each share, the indices of its groups in the batch.
        """
        whole = join([share for share in shares if share])
        prompts = (np.array(self._components.prompts[problem], dtype=np.int64) for problem in whole.problems)
        batch, order = replace(whole, prompts=tuple(prompts)), np.argsort(np.concatenate(places)).tolist()
        if order != sorted(order):
            batch = select(batch, order)
        self._lengths.note(batch)
        self._components.order.note(batch.problems, success_rates(batch))
        return batch

    def _streamed_share(
        self, step: int, problems: list[int], admission: Admission, exchange: ranks.Exchange, clock: Stopwatch
    ) -> tuple[StepRollouts | None, int]:
        """Samples this rank's part for `_stream`, given all problems that the step may need."""
        places = self._places_in_stream(len(problems))[ranks.rank()].tolist()
        prompts = self._prompts(step, [problems[place] for place in places], places)
        group_size = self._training.group_size
        scoring = self._scoring(prompts)
        stream = RankStream(
            admission,
            places,
            scoring,
            group_size=group_size,
            exchange=exchange,
            clock=clock,
            by_term=self._by_term,
        )
        with clock("rollout"), memory_of_sampler(self._components.spec.rollout, self._components.device):
            unfinished_tokens = self._components.spec.rollout.rollouter.stream(
                prompts,
                self._components.sampler,
                self._components.tokenizer,
                group_size=group_size,
                sampling=self._sampling,
                admit=stream.admit,
                on_response=stream.ended,
            )
        needed = prompts[: int(np.searchsorted(places, admission.needed or 0))]
        groups = [
            RolloutGroup(prompt.token_ids, stream.group(index), self._components.sampler.policy_version)
            for index, prompt in enumerate(needed)
        ]
        share = self._scored(groups, needed, [problems[place] for place in places[: len(needed)]], scoring, clock)
        return share, unfinished_tokens + stream.sampled_tokens(after=len(needed))

    def _share(
        self, step: int, taken: int, problems: Sequence[int], places: Integers, clock: Stopwatch
    ) -> StepRollouts | None:
        """Samples and scores the prompts of this rank, if any. `places`: their indices among the problems.

        The problems follow `taken` others of the step. A prompt's seed is derived from the run's seed, the step and the
        prompt's index in it, so the responses do not depend on the number of ranks.
        """
        if not len(places):
            return None
        mine = [problems[place] for place in places]
        prompts = self._prompts(step, mine, [taken + int(place) for place in places])
        scoring = self._scoring(prompts)

        def begin(index: int, rollout: Rollout) -> None:
            with clock("reward", on_host=True):  # called per response while the engine computes the next tokens
                scoring.begin(index, rollout)

        with clock("rollout"), memory_of_sampler(self._components.spec.rollout, self._components.device):
            groups = self._components.spec.rollout.rollouter.generate(
                prompts,
                self._components.sampler,
                self._components.tokenizer,
                group_size=self._training.group_size,
                sampling=self._sampling,
                on_response=begin,
            )
        return self._scored(groups, prompts, mine, scoring, clock)

    def _prompts(self, step: int, problems: Sequence[int], places: Sequence[int]) -> list[SeededPrompt]:
        """Returns the prompts of the problems with these indices in the step."""
        seeds = [seed_of(self._components.seed, step, place) for place in places]
        return [
            SeededPrompt(
                self._components.problems[problem],
                tuple(self._components.prompts[problem]),
                seed,
                self._journal.of_prompt(step, seed),
            )
            for problem, seed in zip(problems, seeds, strict=True)
        ]

    def _scoring(self, prompts: Sequence[SeededPrompt]) -> Scoring:
        """Returns the scoring of the responses to these prompts."""
        asked = [prompt.problem for prompt in prompts for _ in range(self._training.group_size)]
        several_turns = self._components.spec.rollout.rollouter.type != "single_turn"
        return Scoring(
            self._components.tokenizer,
            self._components.scorer,
            asked,
            group_size=self._training.group_size,
            reward_at=self._components.spec.reward_at,
            with_turns=several_turns,
        )

    def _scored(
        self,
        groups: Sequence[RolloutGroup],
        prompts: Sequence[SeededPrompt],
        problems: Sequence[int],
        scoring: Scoring,
        clock: Stopwatch,
    ) -> StepRollouts | None:
        """Checks the groups and returns them with their scores; None if there are no groups."""
        check_rollouts(groups, prompts, group_size=self._training.group_size, sampling=self._sampling)
        if not groups:
            return None
        with clock("reward"):
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            texts = scoring.texts(len(rollouts))
            scores = self._at_worst(self._penalized(scoring.scores(len(rollouts)), rollouts, prompts))
        return collate(groups, problems=problems, responses=texts, scores=scores, turns=scoring.turns(len(rollouts)))

    def _at_worst(self, scores: list[Score]) -> list[Score]:
        """Returns the scores, with failures lowered to the least score of their group; see `failures_at_worst`."""
        size = self._training.group_size
        groups = [scores[begin : begin + size] for begin in range(0, len(scores), size)]
        return [score for group in groups for score in failures_at_worst(group)]

    def _penalized(self, scores: list[Score], rollouts: list[Rollout], prompts: Sequence[SeededPrompt]) -> list[Score]:
        """Returns the scores with the penalties on length subtracted. Given tokens count too, because they use up the
        response's room."""
        spec, size = self._components.spec, self._training.group_size
        rewards = [spec.reward_at(prompt.problem.source) for prompt in prompts for _ in range(size)]
        lengths = torch.tensor([rollout.length for rollout in rollouts])
        return [
            self._of_length(score, reward.overlong, length) if reward.overlong else score
            for score, reward, length in zip(scores, rewards, lengths, strict=True)
        ]

    def _of_length(self, score: Score, overlong: Overlong, length: Tensor) -> Score:
        longest = self._sampling.max_response_length
        share = overlong_penalties(length, max_response_length=longest, buffer=overlong.buffer)
        return replace(score, penalty=float(overlong.penalty * share))

    def close(self) -> None:
        """Ends the thread. Batches in progress are lost."""
        if self._ahead:
            self._ahead.close()
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def success_rates(batch: StepRollouts) -> list[float]:
    """Returns each group's share of correct responses, or the mean value under a graded reward, which has no correct
    responses."""
    right = [score.value if score.correct is None else float(score.correct) for score in batch.scores]
    rates = np.bincount(batch.group_ids, weights=np.clip(right, 0.0, 1.0)) / np.bincount(batch.group_ids)
    return [float(rate) for rate in rates]


def _known_to_others(share: StepRollouts | None) -> StepRollouts | None:
    """Returns the part of this rank's share that other ranks get; None without a share."""
    return without_contents(share) if share else None


def _next_groups(streamed: StepRollouts, taken: int, count: int) -> StepRollouts:
    """Returns groups of streamed rollouts in the form that `refill` gets from a sampler."""
    return select(streamed, range(taken, taken + count))
