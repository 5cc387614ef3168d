"""`rpg replay`: a run's recorded rollouts under the objective that it was trained with and under another."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipelines.home import Home
from pipelines.unrecorded import why_incomplete
from rpg.batches.batch import StepRollouts
from rpg.files import read_json
from rpg.replay.comparison import Furthest, GradientComparison
from rpg.replay.step import RecordedStep, ReplayedStep, replay_step, response_advantages
from rpg.replay.tally import Tally
from rpg.rewards.score import Score
from specs.errors import RpgError
from specs.loader import with_objective
from specs.schema.experiment import Experiment
from storage import Store

if TYPE_CHECKING:
    import pyarrow as pa

TOKENS_AT_ONCE = 2**20
"""Rows of the table `tokens` that one query reads."""
_STEPS = "SELECT step, sum(num_tokens) AS tokens FROM rollouts WHERE run_id = ? GROUP BY step ORDER BY step"
_ROLLOUTS = """
    SELECT step, group_id, reward, advantage, num_tokens, finish_reason FROM rollouts
    WHERE run_id = ? AND step BETWEEN ? AND ? ORDER BY step, rollout_id
"""
_TOKENS = """
    SELECT step, position, token_id, logprob, old_logprob, ref_logprob, rollout_logprob, entropy, ratio, clipped
    FROM tokens
    WHERE run_id = ? AND step BETWEEN ? AND ? AND sampled ORDER BY step, rollout_id, position
"""
_LEDGER = {
    "logprobs": "logprob",
    "old_logprobs": "old_logprob",
    "ref_logprobs": "ref_logprob",
    "entropies": "entropy",
    "ratios": "ratio",
    "clipped": "clipped",
}
"""Column of the token ledger -> of the table `tokens`."""
_LOSSES = "SELECT step, value FROM metrics WHERE run_id = ? AND name = 'loss'"


class NothingToReplayError(RpgError):
    """The run has no recorded rollouts of the steps that were asked for, or not all of their tokens."""


@dataclass(slots=True)
class Reproduction:
    """How far what training recorded is from the run's own objective, replayed."""

    ratio: float = 0.0
    """Largest difference of a token's ratio, relative to it."""
    clipped: int = 0
    """Tokens whose clip differs."""
    advantage: float = 0.0
    """Largest difference of a response's advantage."""
    loss: float | None = None
    """Largest difference of a step's loss; None where an update's logprobs are not on record."""

    @property
    def holds(self) -> bool:
        """Whether the differences are those of rounding."""
        return self.ratio < 1e-4 and not self.clipped and self.advantage < 1e-4 and (self.loss or 0.0) < 1e-4


@dataclass(slots=True)
class RunReplay:
    """Some of a run's steps under two objectives, step by step and over all of them."""

    run_id: str
    recorded: Experiment
    replayed: Experiment
    steps: list[dict[str, Any]] = field(default_factory=list)
    overall: dict[str, Any] = field(default_factory=dict)
    furthest: list[dict[str, Any]] = field(default_factory=list)
    reproduction: Reproduction = field(default_factory=Reproduction)

    @property
    def left_out(self) -> list[str]:
        """What training takes into account and the record cannot give, a sentence each."""
        training, sentences = self.recorded.training, []
        if training.entropy_coef:
            sentences.append(
                f"the gradient of the entropy bonus (training.entropy_coef {training.entropy_coef:g}): it follows from"
                " the whole distribution of each token, which is not on record. The losses have the bonus; gradient"
                " weights, cosine and length do not"
            )
        if training.epochs > 1:
            sentences.append(
                f"all but the last of training.epochs {training.epochs}: each token is on record as at its last update,"
                " and so are losses and weights here"
            )
        if self.replayed.objective.penalizes_reward and any(step["untrained_tokens"] for step in self.steps):
            sentences.append(
                "the divergence that the replayed objective takes off the reward, for tokens that were not trained on:"
                " their logprobs are not on record"
            )
        return sentences

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        settings = {
            name: {
                "objective": experiment.objective.model_dump(mode="json"),
                "advantage": experiment.advantage.model_dump(mode="json"),
            }
            for name, experiment in (("recorded", self.recorded), ("replayed", self.replayed))
        }
        differences = self.reproduction
        return {
            "run_id": self.run_id,
            **settings,
            "reproduced": {
                "holds": differences.holds,
                "ratio": differences.ratio,
                "clipped": differences.clipped,
                "advantage": differences.advantage,
                "loss": differences.loss,
            },
            "left_out": self.left_out,
            "overall": self.overall,
            "steps": self.steps,
            "furthest": self.furthest,
        }


def replay_run(
    home: Home,
    run_id: str,
    objective: str,
    *,
    overrides: Iterable[str] = (),
    first: int = 0,
    last: int = 2**31 - 1,
    only: Sequence[int] = (),
) -> RunReplay:
    """A run's recorded rollouts under its own objective and under another.

    Args:
        objective: as `with_objective` takes it.
        first, last: the steps to take, both included.
        only: of these, the steps to take; empty: all.
    Raises:
        SpecError: the objective is wrong.
        NothingToReplayError: no such steps are on record, or not with all of their tokens.
    """
    spec = read_json(home.run(run_id) / "spec.json")
    result = RunReplay(run_id, with_objective(spec, ""), with_objective(spec, objective, overrides))
    training, reproduction = result.recorded.training, result.reproduction
    if training.epochs == 1:
        reproduction.loss = 0.0
    recorded_tally, other_tally, gradients, furthest = Tally(), Tally(), GradientComparison(), Furthest()
    with Store.open(home.root) as store:
        losses = dict(store.query(_LOSSES, [run_id]).rows)
        for step in _recorded_steps(home, store, run_id, first, last, only):
            recorded = replay_step(step, result.recorded.at_step(step.step))
            other = replay_step(step, result.replayed.at_step(step.step))
            entry = _step_entry(step.step, recorded, other, training.minibatches)
            result.steps.append(entry)
            _reproduce(reproduction, step, recorded, losses.get(step.step), entry)
            recorded_tally.add(recorded, training.minibatches)
            other_tally.add(other, training.minibatches)
            gradients.add(recorded, other)
            furthest.add(step, recorded, other)
    if not result.steps:
        raise NothingToReplayError(f"{run_id} has no recorded rollouts of these steps; {_recorded_range(home, run_id)}")
    result.overall = {
        "recorded": recorded_tally.metrics(),
        "replayed": other_tally.metrics(),
        **gradients.metrics(),
    }
    result.furthest = furthest.tokens()
    return result


def _step_entry(step: int, recorded: ReplayedStep, other: ReplayedStep, updates: int) -> dict[str, Any]:
    """The metrics of one step under both objectives."""
    recorded_tally, other_tally, gradients = Tally(), Tally(), GradientComparison()
    recorded_tally.add(recorded, updates)
    other_tally.add(other, updates)
    gradients.add(recorded, other)
    trained = int(recorded.trained.sum())
    return {
        "step": step,
        "tokens": trained,
        "untrained_tokens": len(recorded.trained) - trained,
        "recorded": recorded_tally.metrics(),
        "replayed": other_tally.metrics(),
        **gradients.metrics(),
    }


def _reproduce(
    reproduction: Reproduction, step: RecordedStep, replayed: ReplayedStep, loss: float | None, entry: dict[str, Any]
) -> None:
    """Takes a step into account, of which the run's own objective should give back what is on record."""
    trained = replayed.trained
    if trained.any():
        ratio = step.ledger["ratios"][trained]
        reproduction.ratio = max(reproduction.ratio, float(((replayed.ratio[trained] - ratio).abs() / ratio).max()))
        reproduction.clipped += int((replayed.clipped[trained] != (step.ledger["clipped"][trained] > 0)).sum())
    difference = response_advantages(step, replayed).numpy() - step.advantages
    reproduction.advantage = max(reproduction.advantage, float(abs(difference).max()))
    if reproduction.loss is not None and loss is not None:  # what was not trained on has no part in it
        reproduction.loss = max(reproduction.loss, abs(loss - entry["recorded"].get("loss", 0.0)))


def _recorded_steps(
    home: Home, store: Store, run_id: str, first: int, last: int, only: Sequence[int]
) -> Iterator[RecordedStep]:
    """The chosen steps that have rollouts on record. Raises NothingToReplayError where tokens of one are missing."""
    for begin, end in _spans(store.query(_STEPS, [run_id]).rows, first, last, only):
        rollouts = store.query(_ROLLOUTS, [run_id, begin, end]).arrow()
        tokens = store.query(_TOKENS, [run_id, begin, end]).arrow()
        rollout_steps, token_steps = rollouts.column("step").to_numpy(), tokens.column("step").to_numpy()
        for step in np.unique(rollout_steps).tolist():
            if only and step not in only:
                continue
            responses, of_step = _rows(rollouts, rollout_steps, step), _rows(tokens, token_steps, step)
            _require_all_tokens(home, run_id, step, len(of_step), int(responses.column("num_tokens").to_numpy().sum()))
            yield _recorded(step, responses, of_step)


def _require_all_tokens(home: Home, run_id: str, step: int, recorded: int, sampled: int) -> None:
    if recorded == sampled:
        return
    cause = why_incomplete(home.run(run_id), "tokens") or "`rpg db check` says what is damaged"
    raise NothingToReplayError(
        f"a replay needs every token of a step; of step {step} of {run_id} {recorded:,} of {sampled:,} are on record:"
        f" {cause}"
    )


def _spans(steps: Sequence[tuple[int, int]], first: int, last: int, only: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring steps, as many at once as TOKENS_AT_ONCE allows."""
    span: list[int] = []
    held = 0
    for step, tokens in steps:
        if not first <= step <= last or (only and step not in only):
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


def _recorded(step: int, rollouts: "pa.Table", tokens: "pa.Table") -> RecordedStep:
    def of_tokens(name: str) -> torch.Tensor:
        return torch.from_numpy(tokens.column(name).cast("float32").to_numpy().copy())

    group_ids = rollouts.column("group_id").to_numpy().astype(np.int64)
    num_groups = int(group_ids.max()) + 1
    token_ids = tokens.column("token_id").to_numpy().astype(np.int64)
    return RecordedStep(
        step=step,
        rollouts=StepRollouts(
            prompts=(np.empty(0, dtype=np.int64),) * num_groups,
            problems=(0,) * num_groups,
            group_ids=group_ids,
            token_ids=token_ids,
            sampled=np.ones(len(token_ids), dtype=np.bool_),
            rollout_logprobs=of_tokens("rollout_logprob").numpy(),
            lengths=rollouts.column("num_tokens").to_numpy().astype(np.int64),
            finish_reasons=tuple(rollouts.column("finish_reason").to_pylist()),
            responses=("",) * len(group_ids),
            scores=tuple(Score(value=reward, correct=False) for reward in rollouts.column("reward").to_pylist()),
            policy_version=0,
        ),
        positions=tokens.column("position").to_numpy().astype(np.int64),
        ledger={column: of_tokens(name) for column, name in _LEDGER.items()},
        advantages=rollouts.column("advantage").to_numpy(),
    )


def _recorded_range(home: Home, run_id: str) -> str:
    """Which steps are on record, as the end of a message."""
    with Store.open(home.root) as store:
        steps = [row[0] for row in store.query(_STEPS, [run_id]).rows]
    if steps:
        return f"there are steps {steps[0]} to {steps[-1]}"
    return why_incomplete(home.run(run_id), "rollouts") or "it has recorded no step yet"


def setting(experiment: Experiment) -> str:
    """An objective and its advantage in one line: what is not at its default."""
    objective = experiment.objective.model_dump(mode="json", exclude_defaults=True)
    parts = {"objective": {"type": experiment.objective.type, **objective}}
    advantage = experiment.advantage.model_dump(mode="json")
    return f"{json.dumps(parts['objective'])}, advantage {json.dumps(advantage)}"
