"""Recorded steps, read from the store."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipelines.home.home import Home
from pipelines.home.unrecorded import why_incomplete
from rpg.batches.batch import StepRollouts, counted
from rpg.metrics import SCHEDULED
from rpg.replay.step import RecordedStep
from rpg.rewards.score import Score
from rpg.types import RecordedTurn, TurnCounts
from specs.errors import RpgError
from specs.schema.experiment import Experiment
from specs.schema.schedule import Place, loops_in
from storage import Store

if TYPE_CHECKING:
    import pyarrow as pa

TOKENS_AT_ONCE = 2**20
"""Rows of the table `tokens` that one query reads."""
_STEPS = "SELECT step, sum(num_tokens) AS tokens FROM rollouts WHERE run_id = ? GROUP BY step ORDER BY step"
_ROLLOUTS = """
    SELECT step, group_id, reward, reward_terms, reward_error, advantage, num_tokens, finish_reason FROM rollouts
    WHERE run_id = ? AND step BETWEEN ? AND ? ORDER BY step, rollout_id
"""
_TOKENS = """
    SELECT step, rollout_id, position, token_id, sampled,
        logprob, old_logprob, ref_logprob, rollout_logprob, entropy, ratio, clipped
    FROM tokens
    WHERE run_id = ? AND step BETWEEN ? AND ? AND (sampled OR ?) ORDER BY step, rollout_id, position
"""
_TURNS = """
    SELECT step, rollout_id, num_tokens, reward FROM turns
    WHERE run_id = ? AND step BETWEEN ? AND ? AND sampled AND reward IS NOT NULL ORDER BY step, rollout_id, turn
"""
_RESTARTS = """
    SELECT rollout_id, place, num_tokens FROM (
        SELECT *, sum(num_tokens) OVER (PARTITION BY rollout_id ORDER BY turn)::BIGINT - num_tokens AS place
        FROM turns WHERE run_id = ? AND step = ?
    ) WHERE restart ORDER BY rollout_id, turn
"""
_PROMPTS = """
    SELECT any_value(prompt) AS prompt FROM rollouts WHERE run_id = ? AND step = ? GROUP BY group_id ORDER BY group_id
"""
_METRIC = "SELECT step, value FROM metrics WHERE run_id = ? AND name = ?"
_LEDGER = {
    "logprobs": "logprob",
    "old_logprobs": "old_logprob",
    "ref_logprobs": "ref_logprob",
    "entropies": "entropy",
    "ratios": "ratio",
    "clipped": "clipped",
}
"""Column of the token ledger -> column of the table `tokens`."""
Turns = dict[int, list[RecordedTurn]]
"""Response -> those of its turns that the policy wrote."""
Encode = Callable[[list[str]], list[list[int]]]
"""Function from prompts to their token ids."""


@dataclass(frozen=True, slots=True)
class ChosenSteps:
    """The steps that a user requests: from the first to the last inclusive, or only the named steps among them."""

    first: int = 0
    last: int = 2**31 - 1
    only: tuple[int, ...] = ()

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last and (not self.only or step in self.only)

    @property
    def all(self) -> bool:
        """Whether all rows are chosen."""
        return self == ChosenSteps()


class NothingToReplayError(RpgError):
    """Error for a run that has no recorded rollouts of the requested steps, or not all of their tokens."""


@dataclass(frozen=True, slots=True)
class RunRows:
    """The recorded rows of one run that a replay reads."""

    store: Store
    home: Home
    run_id: str

    def metric(self, name: str) -> dict[int, float]:
        """Returns the metric's value by step."""
        return dict(self.store.query(_METRIC, [self.run_id, name]).rows)

    def loops(self, experiment: Experiment) -> dict[int, dict[Place, float]]:
        """Returns step -> the recorded values of an experiment's closed loops, by their paths."""
        by_step: dict[int, dict[Place, float]] = {}
        for path, _ in loops_in(experiment):
            for step, value in self.metric(SCHEDULED[path]).items():
                by_step.setdefault(step, {})[path] = value
        return by_step

    def steps(self) -> list[int]:
        """Returns the steps that have rollouts."""
        return [step for step, _ in self.store.query(_STEPS, [self.run_id]).rows]

    def chosen_steps(self, chosen: ChosenSteps) -> Iterator[RecordedStep]:
        """Yields the chosen steps in order, without prompts and given tokens.

        Raises:
            NothingToReplayError: none of the steps is on record, or one lacks some of its tokens.
        """
        spans = list(_spans(self.store.query(_STEPS, [self.run_id]).rows, chosen))
        if not spans:
            raise NothingToReplayError(f"{self.run_id} has no recorded rollouts of these steps; {self._range()}")
        for begin, end in spans:
            rollouts, tokens = self._read(begin, end, with_given=False)
            turns = self._turns(begin, end)
            rollout_steps, token_steps = rollouts.column("step").to_numpy(), tokens.column("step").to_numpy()
            for step in np.unique(rollout_steps).tolist():
                if step in chosen:
                    responses = _rows(rollouts, rollout_steps, step)
                    groups = int(responses.column("group_id").to_numpy().max()) + 1
                    of_step = _rows(tokens, token_steps, step)
                    yield self._recorded(step, responses, of_step, turns.get(step, {}), prompts=[[]] * groups)

    def whole_step(self, step: int, encode: Encode) -> RecordedStep:
        """Returns one step with the model's whole input, which includes prompts and the environment's tokens.

        Raises:
            NothingToReplayError: not all of its tokens are on record.
        """
        rollouts, tokens = self._read(step, step, with_given=True)
        prompts = [prompt for (prompt,) in self.store.query(_PROMPTS, [self.run_id, step]).rows]
        turns = self._turns(step, step).get(step, {})
        recorded = self._recorded(step, rollouts, tokens, turns, prompts=encode(prompts))
        return replace(recorded, rollouts=self._with_contexts(step, recorded.rollouts))

    def _with_contexts(self, step: int, rollouts: StepRollouts) -> StepRollouts:
        """Returns the step's rollouts with the recorded contexts that replace the prompt."""
        found: dict[int, list[tuple[int, int]]] = {}
        for response, place, tokens in self.store.query(_RESTARTS, [self.run_id, step]).rows:
            found.setdefault(response, []).append((place, tokens))
        if not found:
            return rollouts
        known = rollouts.turn_counts or (TurnCounts(1, 0, 0, 0.0),) * len(rollouts.lengths)
        counts = (replace(each, contexts=tuple(found.get(place, ()))) for place, each in enumerate(known))
        return replace(rollouts, turn_counts=tuple(counts))

    def _read(self, begin: int, end: int, *, with_given: bool) -> tuple["pa.Table", "pa.Table"]:
        """Returns the rollouts and the tokens of neighbouring steps."""
        rollouts = self.store.query(_ROLLOUTS, [self.run_id, begin, end]).arrow()
        return rollouts, self.store.query(_TOKENS, [self.run_id, begin, end, with_given]).arrow()

    def _turns(self, begin: int, end: int) -> dict[int, Turns]:
        """Returns the policy's turns by step if the environment rewards them; without such rewards no loss depends on
        turns."""
        found: dict[int, Turns] = {}
        for step, rollout, tokens, reward in self.store.query(_TURNS, [self.run_id, begin, end]).rows:
            turn = RecordedTurn(sampled=True, num_tokens=tokens, text="", reward=reward)
            found.setdefault(step, {}).setdefault(rollout, []).append(turn)
        return found

    def _recorded(
        self,
        step: int,
        rollouts: "pa.Table",
        tokens: "pa.Table",
        turns: Turns,
        *,
        prompts: Sequence[Sequence[int]],
    ) -> RecordedStep:
        sampled = tokens.column("sampled").to_numpy()
        self._require_all_tokens(step, int(sampled.sum()), int(rollouts.column("num_tokens").to_numpy().sum()))

        def of_sampled(name: str) -> torch.Tensor:
            return torch.from_numpy(tokens.column(name).cast("float32").to_numpy()[sampled])

        group_ids = rollouts.column("group_id").to_numpy().astype(np.int64)
        of_responses = tuple(tuple(turns.get(response, ())) for response in range(len(group_ids))) if turns else ()
        counts = tuple(map(counted, of_responses))
        return RecordedStep(
            step=step,
            rollouts=StepRollouts(
                prompts=tuple(np.array(prompt, dtype=np.int64) for prompt in prompts),
                problems=(0,) * len(prompts),
                group_ids=group_ids,
                num_sampled=rollouts.column("num_tokens").to_numpy().astype(np.int64),
                held=np.arange(len(group_ids), dtype=np.int64),
                token_ids=tokens.column("token_id").to_numpy().astype(np.int64),
                sampled=sampled,
                rollout_logprobs=of_sampled("rollout_logprob").numpy(),
                lengths=np.bincount(tokens.column("rollout_id").to_numpy(), minlength=len(group_ids)).astype(np.int64),
                finish_reasons=tuple(rollouts.column("finish_reason").to_pylist()),
                responses=("",) * len(group_ids),
                scores=tuple(
                    _score(row, sum(counts[response].rewards) if counts else 0.0)
                    for response, row in enumerate(
                        rollouts.select(["reward", "reward_terms", "reward_error"]).to_pylist()
                    )
                ),
                policy_version=0,
                turns=of_responses,
                turn_counts=counts,
            ),
            positions=tokens.column("position").to_numpy().astype(np.int64)[sampled],
            ledger={column: of_sampled(name) for column, name in _LEDGER.items()},
            advantages=rollouts.column("advantage").to_numpy(),
        )

    def _require_all_tokens(self, step: int, recorded: int, sampled: int) -> None:
        if recorded == sampled:
            return
        cause = why_incomplete(self.home.run(self.run_id), "tokens") or "`rpg db check` reports the damage"
        raise NothingToReplayError(
            f"a replay needs every token of a step. {self.run_id} has {recorded:,} of {sampled:,} of step {step} on"
            f" record: {cause}"
        )

    def _range(self) -> str:
        """Returns the range of recorded steps, as text for the end of a message."""
        if steps := self.steps():
            return f"there are steps {steps[0]} to {steps[-1]}"
        return why_incomplete(self.home.run(self.run_id), "rollouts") or "it has recorded no step yet"


def _score(row: dict[str, Any], turns: float = 0.0) -> Score:
    """Returns the recorded score of a response, given the sum of its turns' rewards. The difference between the reward
    and the sum of terms and turns' rewards is a penalty."""
    held: dict[str, list[float]] = json.loads(row["reward_terms"] or "{}")
    terms, weights = ({name: each[place] for name, each in held.items()} for place in (0, 1))
    value = sum(weights[name] * terms[name] for name in terms) if terms else row["reward"] - turns
    penalty, error = row["reward"] - turns - value, row["reward_error"]
    return Score(value, correct=False, error=error, penalty=penalty, turns=turns, terms=terms, weights=weights)


def _spans(steps: Sequence[tuple[int, int]], chosen: ChosenSteps) -> Iterator[tuple[int, int]]:
    """Yields spans of neighbouring steps, each with as many steps as TOKENS_AT_ONCE allows."""
    span: list[int] = []
    held = 0
    for step, tokens in steps:
        if step not in chosen:
            continue
        if span and held + tokens > TOKENS_AT_ONCE:
            yield span[0], span[-1]
            span, held = [], 0
        span.append(step)
        held += tokens
    if span:
        yield span[0], span[-1]


def _rows(table: "pa.Table", steps: Any, step: int) -> "pa.Table":
    begin, end = np.searchsorted(steps, [step, step + 1])
    return table.slice(begin, end - begin)
