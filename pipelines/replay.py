"""`rpg replay`: reads a run's recorded rollouts, weighs them under two objectives and sets the figures side by side."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.home import Home
from rpg.files import read_json
from rpg.replay.comparison import Furthest, GradientComparison
from rpg.replay.figures import Tally
from rpg.replay.replay import RecordedStep, Weights, replay, response_advantages
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
_LOSSES = "SELECT step, value FROM metrics WHERE run_id = ? AND name = 'loss'"


class NothingToReplayError(RpgError):
    """The run has no recorded rollouts of the steps that were asked for."""


@dataclass(slots=True)
class Reproduction:
    """How far the run's own objective, replayed, is from what training recorded."""

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
class Replay:
    """What a replay found."""

    run_id: str
    recorded: Experiment
    replayed: Experiment
    steps: list[dict[str, Any]] = field(default_factory=list)
    overall: dict[str, Any] = field(default_factory=dict)
    furthest: list[dict[str, Any]] = field(default_factory=list)
    reproduction: Reproduction = field(default_factory=Reproduction)

    @property
    def left_out(self) -> list[str]:
        """What training takes into account and the record cannot give."""
        training, found = self.recorded.training, []
        if training.entropy_coef:
            found.append(
                f"the gradient of the entropy bonus (training.entropy_coef {training.entropy_coef:g}): it follows from"
                " the whole distribution of each token, which is not on record. The losses have the bonus; gradient"
                " weights, cosine and length do not"
            )
        if training.epochs > 1:
            found.append(
                f"all but the last of training.epochs {training.epochs}: each token is on record as at its last update,"
                " and so are losses and weights here"
            )
        if self.replayed.objective.penalizes_reward and any(step["untrained_tokens"] for step in self.steps):
            found.append(
                "the divergence that the replayed objective takes off the reward, for tokens that were not trained on:"
                " their logprobs are not on record"
            )
        return found

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
) -> Replay:
    """A run's recorded rollouts under its own objective and under another.

    Args:
        objective: as `with_objective` takes it.
        first, last: the steps to take, both included.
        only: of these, the steps to take; empty: all.
    Raises:
        SpecError: the objective is wrong.
        NothingToReplayError: no such steps are on record.
    """
    spec = read_json(home.run(run_id) / "spec.json")
    found = Replay(run_id, with_objective(spec, ""), with_objective(spec, objective, overrides))
    if found.recorded.training.epochs == 1:
        found.reproduction.loss = 0.0
    ours, theirs, apart, furthest = Tally(), Tally(), GradientComparison(), Furthest()
    with Store.open(home.root) as store:
        losses = dict(store.query(_LOSSES, [run_id]).rows)
        for recorded, columns in _recorded_steps(store, run_id, first, last, only):
            one, other = replay(recorded, found.recorded), replay(recorded, found.replayed)
            entry = _step(recorded.step, one, other, found.recorded.training.minibatches)
            found.steps.append(entry)
            _reproduce(found.reproduction, recorded, one, columns, losses.get(recorded.step), entry)
            for tally, weights in ((ours, one), (theirs, other)):
                tally.add(weights, found.recorded.training.minibatches)
            apart.add(one, other)
            furthest.add(recorded, one, other)
    if not found.steps:
        raise NothingToReplayError(f"{run_id} has no recorded rollouts of these steps; {_which(home, run_id)}")
    found.overall = {"recorded": ours.figures(), "replayed": theirs.figures(), **apart.figures()}
    found.furthest = furthest.tokens()
    return found


def _step(step: int, one: Weights, other: Weights, updates: int) -> dict[str, Any]:
    ours, theirs, apart = Tally(), Tally(), GradientComparison()
    ours.add(one, updates)
    theirs.add(other, updates)
    apart.add(one, other)
    known = int(one.known.sum())
    return {
        "step": step,
        "tokens": known,
        "untrained_tokens": len(one.known) - known,
        "recorded": ours.figures(),
        "replayed": theirs.figures(),
        **apart.figures(),
    }


def _reproduce(
    found: Reproduction,
    recorded: RecordedStep,
    weights: Weights,
    columns: dict[str, Any],
    loss: float | None,
    entry: dict[str, Any],
) -> None:
    """Holds the run's own objective, replayed, against the recorded columns."""
    known = weights.known.numpy()
    if known.any():
        ratio = columns["ratio"][known]
        found.ratio = max(found.ratio, float((abs(weights.ratio.numpy()[known] - ratio) / ratio).max()))
        found.clipped += int((weights.clipped.numpy()[known] != columns["clipped"][known]).sum())
    advantages = response_advantages(recorded, weights).numpy()
    found.advantage = max(found.advantage, float(abs(advantages - columns["advantage"]).max()))
    if found.loss is not None and loss is not None:  # what was not trained on has no part in it
        found.loss = max(found.loss, abs(loss - entry["recorded"].get("loss", 0.0)))


def _recorded_steps(
    store: Store, run_id: str, first: int, last: int, only: Sequence[int]
) -> Iterator[tuple[RecordedStep, dict[str, Any]]]:
    """Step by step: what a replay needs, and the columns that it must give back."""
    for begin, end in _spans(store.query(_STEPS, [run_id]).rows, first, last, only):
        rollouts = store.query(_ROLLOUTS, [run_id, begin, end]).arrow()
        tokens = store.query(_TOKENS, [run_id, begin, end]).arrow()
        rollout_steps, token_steps = rollouts.column("step").to_numpy(), tokens.column("step").to_numpy()
        for step in np.unique(rollout_steps).tolist():
            if only and step not in only:
                continue
            yield _recorded(step, _rows(rollouts, rollout_steps, step), _rows(tokens, token_steps, step))


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


def _recorded(step: int, rollouts: "pa.Table", tokens: "pa.Table") -> tuple[RecordedStep, dict[str, Any]]:
    def logprobs(name: str) -> Any:
        return tokens.column(name).to_numpy().astype(np.float32)

    recorded = RecordedStep(
        step=step,
        rewards=rollouts.column("reward").to_numpy().astype(np.float32),
        group_ids=rollouts.column("group_id").to_numpy().astype(np.int64),
        lengths=rollouts.column("num_tokens").to_numpy().astype(np.int64),
        truncated=np.array(rollouts.column("finish_reason").to_pylist()) == "length",
        token_ids=tokens.column("token_id").to_numpy().astype(np.int64),
        positions=tokens.column("position").to_numpy().astype(np.int64),
        logprobs=logprobs("logprob"),
        old_logprobs=logprobs("old_logprob"),
        ref_logprobs=logprobs("ref_logprob"),
        rollout_logprobs=logprobs("rollout_logprob"),
        entropies=logprobs("entropy"),
    )
    columns = {
        "ratio": logprobs("ratio"),
        "clipped": np.array(tokens.column("clipped").fill_null(False).to_pylist(), dtype=bool),
        "advantage": rollouts.column("advantage").to_numpy(),
    }
    return recorded, columns


def _which(home: Home, run_id: str) -> str:
    """Which steps there are."""
    with Store.open(home.root) as store:
        steps = [row[0] for row in store.query(_STEPS, [run_id]).rows]
    return f"there are steps {steps[0]} to {steps[-1]}" if steps else "it has recorded no step yet"


def setting(experiment: Experiment) -> str:
    """An objective and its advantage in one line: what is not at its default."""
    objective = experiment.objective.model_dump(mode="json", exclude_defaults=True)
    parts = {"objective": {"type": experiment.objective.type, **objective}}
    advantage = experiment.advantage.model_dump(mode="json")
    return f"{json.dumps(parts['objective'])}, advantage {json.dumps(advantage)}"
