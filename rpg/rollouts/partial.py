"""Responses that are sampled over several steps, each part under the weights of its step (`rollout.partial`).

Sampling for a step ends once `prompts_per_step` groups have ended. The step takes these. The other groups stay open and
continue in the next step: the sampler, which has new weights by then, computes prompt and tokens so far again.

Decoding steps, not time, decide which responses are decoded together, and the positions of the cuts. After every
ADMISSION_STEPS of them (`rpg/samplers/base.py`), on every rank:

1. All ranks learn which responses have ended.
2. If enough groups have ended, sampling for the step ends. The step takes the first of them, in the order in which they
   began. If more have ended, they are the first that the next step takes.
3. Otherwise prompts start, in their order, while fewer than `in_flight` responses are under way. A group starts on the
   rank whose samplers have the fewest.

So the lengths of the responses decide everything, and a step that is sampled again, after a kill, is the same in every
bit: a checkpoint contains the open groups. Every response that begins is trained on once, in the step that its group
reaches by ending. The first steps therefore get shorter responses than the policy gives, and those that the last step
leaves open are longer than others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rpg.data.order import seed_of
from rpg.processes import ranks
from rpg.samplers.base import Sampler
from rpg.types import FinishReason, Pause, Rollout, Sampling, Turn, TurnRequest

OPEN = "open"
"""Stem of the checkpoint file with the open groups."""


@dataclass(slots=True)
class OpenResponse:
    """The tokens of a response so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Logprob of each token under the policy that sampled it, nats."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """See Rollout."""
    finish_reason: FinishReason | None = None
    """Reason why the response ended; None if it has not ended."""

    def extend(self, part: Rollout, version: int) -> None:
        """Appends the tokens that a policy has sampled."""
        self.token_ids += part.response_ids
        self.logprobs += part.rollout_logprobs
        last, before = self.versions.pop() if self.versions else (version, 0)
        if last != version:
            self.versions.append((last, before))
            before = 0
        self.versions.append((version, before + part.num_sampled))

    def rollout(self) -> Rollout:
        """Returns the response, which has ended."""
        assert self.finish_reason is not None
        turn = Turn(tuple(self.token_ids), tuple(self.logprobs))
        return Rollout((turn,), self.finish_reason, versions=tuple(self.versions))

    def plain(self) -> dict[str, Any]:
        """Returns the fields as tensors and plain values, for a checkpoint."""
        tokens, logprobs = torch.tensor(self.token_ids), torch.tensor(self.logprobs)
        return {
            "token_ids": tokens.long(),
            "logprobs": logprobs,
            "versions": list(self.versions),
            "finish_reason": self.finish_reason,
        }


@dataclass(slots=True)
class OpenGroup:
    """A group that has begun and that no step has used yet. Its tokens are on the rank that samples it."""

    number: int
    """Number of groups that began before this group."""
    rank: int
    problem: int
    """Index of the group's problem."""
    seed: int
    left: int
    """Number of responses that have not ended, as far as all ranks know."""
    responses: list[OpenResponse] = field(default_factory=list)
    """The group's responses; empty on ranks that do not sample the group."""

    @property
    def ended(self) -> bool:
        """Whether all of the group's responses on this rank have ended."""
        return all(response.finish_reason for response in self.responses)


class OpenGroups:
    """The groups that have begun and that no step has used yet, in the order in which they began. All ranks have the
    same list."""

    def __init__(self, *, groups: int, group_size: int, in_flight: int, samplers: Sequence[int]) -> None:
        """Takes the bounds.

        Args:
            groups: number of groups of a step.
            group_size: number of responses of a group.
            in_flight: most responses under way at once, at least those of a group.
            samplers: number of samplers of each rank.
        """
        self._needed, self._group_size, self._in_flight = groups, group_size, in_flight
        self._samplers = samplers
        self._begun = 0
        self.groups: list[OpenGroup] = []

    def note(self, ended: Mapping[int, int]) -> None:
        """Records how many responses of each group have ended, by the group's number."""
        for group in self.groups:
            group.left -= ended.get(group.number, 0)

    @property
    def unfinished(self) -> int:
        """Returns the number of unfinished responses."""
        return sum(group.left for group in self.groups)

    @property
    def has_step(self) -> bool:
        """Whether enough groups for a step have ended."""
        return sum(not group.left for group in self.groups) >= self._needed

    def ranks_of_next(self) -> list[int]:
        """Returns the rank of each group that may start now."""
        loads = self._loads()
        starting = []
        while sum(loads.values()) + self._group_size <= self._in_flight:
            starting.append(self._lightest(loads))
            loads[starting[-1]] += self._group_size
        return starting

    def begin(self, rank: int, problem: int, seed: int) -> OpenGroup:
        """Appends a group that starts."""
        group = OpenGroup(self._begun, rank, problem, seed, self._group_size)
        if rank == ranks.rank():
            group.responses = [OpenResponse() for _ in range(self._group_size)]
        self.groups.append(group)
        self._begun += 1
        return group

    def take(self) -> list[OpenGroup]:
        """Removes and returns the groups of a step."""
        taken = [group for group in self.groups if not group.left][: self._needed]
        self.groups = [group for group in self.groups if group not in taken]
        return taken

    def state(self) -> dict[str, Any]:
        """Returns this rank's state for a checkpoint, as tensors and plain values."""
        groups = [
            {
                **{name: getattr(group, name) for name in ("number", "rank", "problem", "seed", "left")},
                "responses": [response.plain() for response in group.responses],
            }
            for group in self.groups
        ]
        return {"begun": self._begun, "groups": groups}

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores the states of all ranks of a run, which may have had a different number of ranks. Without states, no
        group has begun."""
        self._begun, self.groups = states[0]["begun"] if states else 0, []
        for of_ranks in zip(*(state["groups"] for state in states), strict=True):
            rank, left = of_ranks[0]["rank"], of_ranks[0]["left"]
            if len(states) != ranks.world_size() or not self._samplers[rank]:
                rank = self._lightest(self._loads())
            group = OpenGroup(of_ranks[0]["number"], rank, of_ranks[0]["problem"], of_ranks[0]["seed"], left)
            if rank == ranks.rank():
                plain = next(each["responses"] for each in of_ranks if each["responses"])
                group.responses = [_response(each) for each in plain]
            self.groups.append(group)

    def _loads(self) -> dict[int, int]:
        """Returns the number of unfinished responses on each rank that samples."""
        sampling = [rank for rank, samplers in enumerate(self._samplers) if samplers]
        return {rank: sum(group.left for group in self.groups if group.rank == rank) for rank in sampling}

    def _lightest(self, loads: Mapping[int, int]) -> int:
        """Returns the rank with the fewest responses per sampler."""
        return min(loads, key=lambda rank: (loads[rank] / self._samplers[rank], rank))


def _response(plain: Mapping[str, Any]) -> OpenResponse:
    values: dict[str, Any] = {
        name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in plain.items()
    }
    return OpenResponse(**values)


class PartialSampling:
    """This rank's sampling for one step: open groups continue, and others start, until the step has enough groups."""

    def __init__(
        self,
        groups: OpenGroups,
        sampler: Sampler,
        sampling: Sampling,
        *,
        prompt: Callable[[int], Sequence[int]],
        begin: Callable[[Sequence[int]], Sequence[OpenGroup]],
        on_group: Callable[[OpenGroup], None],
        exchange: ranks.Exchange,
    ) -> None:
        """Takes the groups and the sampler.

        Args:
            groups: the open groups.
            sampler: the sampler, with the weights of the step.
            sampling: settings of a whole response.
            prompt: returns the prompt of a problem, by its index.
            begin: begins a group on each of these ranks.
            on_group: called with each group of this rank whose responses have all ended.
            exchange: gathers the value that each rank makes.
        """
        self._groups, self._sampler, self._sampling = groups, sampler, sampling
        self._prompt, self._begin, self._on_group, self._exchange = prompt, begin, on_group, exchange
        self._turns: list[tuple[OpenGroup, OpenResponse]] = []
        """Group and response of each turn that was requested of the sampler."""
        self._ended: dict[int, int] = {}
        """Number of responses of each group that have ended since the last exchange."""

    def run(self) -> list[OpenGroup]:
        """Samples until the step has enough groups, and returns these."""
        self._sampler.serve(
            self._next_turns, sampling=self._sampling, on_response=self._response_ended, on_unfinished=self._extend
        )
        return self._groups.take()

    def _next_turns(self, pause: Pause) -> list[TurnRequest] | None:
        """Returns the turns that begin now; None once the step has enough groups. All ranks call it together, except
        when a turn has ended."""
        if pause == "ended":
            return []
        for ended in self._exchange(self._told):
            self._groups.note(ended)
        if self._groups.has_step:
            return None
        continued = [] if self._turns else list(self._groups.groups)
        return [
            self._request(group, member)
            for group in [*continued, *self._begin(self._groups.ranks_of_next())]
            for member, response in enumerate(group.responses)
            if not response.finish_reason
        ]

    def _told(self) -> dict[int, int]:
        ended, self._ended = self._ended, {}
        return ended

    def _request(self, group: OpenGroup, member: int) -> TurnRequest:
        """Returns the request for the rest of a response. The seed depends on the position at which the rest begins."""
        response = group.responses[member]
        self._turns.append((group, response))
        done = len(response.token_ids)
        return TurnRequest(
            (*self._prompt(group.problem), *response.token_ids),
            seed=seed_of(group.seed, member, done),
            limit=self._sampling.max_response_length - done,
            prompt=group.number,
        )

    def _extend(self, turn: int, part: Rollout) -> None:
        self._turns[turn][1].extend(part, self._sampler.policy_version)

    def _response_ended(self, turn: int, part: Rollout) -> None:
        group, response = self._turns[turn]
        self._extend(turn, part)
        response.finish_reason = part.finish_reason
        self._ended[group.number] = self._ended.get(group.number, 0) + 1
        if group.ended:
            self._on_group(group)
