"""The record of one run for a sink, in terms that every tracker understands."""

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pipelines.home.home import Home
from pipelines.home.runs import read_state, status_of
from specs.machine.files import read_json
from specs.reading.recorded import recorded_spec
from specs.secrets import hide

if TYPE_CHECKING:
    from storage import Store

EVALUATION = "evaluation/"
"""Prefix of the names of evaluation figures."""


@dataclass(frozen=True, slots=True)
class SentRun:
    """The description of a run for a sink. It does not change during execution."""

    run_id: str
    experiment: str
    name: str
    """The run's cell and seed in readable form."""
    question: str
    objective: str
    """The objective's type."""
    seed: int
    cell: dict[str, Any]
    """Path in the spec -> this run's value, for each field that varies."""
    spec: dict[str, Any]
    """The resolved spec, without secrets."""

    @property
    def title(self) -> str:
        """Returns the title of the run in a tracker, as on the dashboard."""
        return f"{self.experiment}: {self.name}"

    @property
    def tags(self) -> tuple[str, ...]:
        """Returns tags to filter runs by."""
        return self.objective, f"seed:{self.seed}"


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of one step of training."""

    step: int
    at: datetime
    """Time of recording."""
    values: dict[str, float]
    """Name -> value. Evaluations are `evaluation/SET/METRIC`, with `/low` and `/high` for the ends of the interval."""


@dataclass(frozen=True, slots=True)
class News:
    """Records of a run after some step, as they are at one moment."""

    metrics: list[Point]
    """Metric values of the later steps, in order."""
    evaluations: list[Point]
    """Evaluations of all steps, in order."""
    attempt: int
    """Number of the trainer's last start. 0: it has not started."""
    resumed_from: int | None
    """The earliest step from which a later start than the given one resumed. None if there was no later start."""
    settled: int | None
    """Step of the newest checkpoint. Steps up to it are not trained again, unless a guard rolls back beyond it. None if
    training is done and no step will be trained again."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The present state of a run."""

    status: str
    """finished, failed, cancelled, crashed, pending or running."""
    reason: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    """The run's results by name: `accuracy_before` and `accuracy_after`, or `score_before` and `score_after` for a
    graded reward; and `answer`, the experiment's answer so far."""


def describe(home: Home, run_id: str) -> SentRun:
    """Returns the description of a run, from its documents."""
    directory = home.run(run_id)
    record = read_json(directory / "run.json")
    spec = recorded_spec(directory)
    return SentRun(
        run_id=run_id,
        experiment=record["experiment"],
        name=record["name"],
        question=record.get("question", ""),
        objective=spec.objective.type,
        seed=record["seed"],
        cell=record.get("values") or {},
        spec=json.loads(hide(spec.model_dump_json())),
    )


def read_news(store: "Store", run_id: str, *, after: int, attempt: int) -> News:
    """Returns the new records of a run, as the store has them now.

    Args:
        after: metrics of later steps are read.
        attempt: number of a start of the trainer; `resumed_from` considers only later starts. 0: it considers none.
    """
    ((newest, resumed_from),) = store.query(
        "select coalesce(max(attempt), 0), min(resumed_from_step) filter (attempt > $attempt and $attempt > 0)"
        " from attempts where run_id = $run_id",
        {"attempt": attempt, "run_id": run_id},
    ).rows
    ((checkpoint,),) = store.query(
        "select coalesce(max(step), 0) from checkpoints where run_id = ? and kind = 'full'", (run_id,)
    ).rows
    trained = store.query(
        "select 1 from stages where run_id = ? and stage = 'train' and status = 'finished'", (run_id,)
    ).rows
    metrics = store.query(
        "select step, max(recorded_at), list(name order by name), list(value order by name) from metrics"
        " where run_id = ? and step > ? group by step order by step",
        (run_id, after),
    ).rows
    return News(
        metrics=[Point(step, at, dict(zip(names, values, strict=True))) for step, at, names, values in metrics],
        evaluations=_evaluations(store, run_id),
        attempt=newest,
        resumed_from=resumed_from,
        settled=None if trained else checkpoint,
    )


def _evaluations(store: "Store", run_id: str) -> list[Point]:
    rows = store.query(
        "select e.step, coalesce(max(m.recorded_at), any_value(r.started_at)), e.dataset, e.metric, any_value(e.value),"
        " any_value(e.ci_low), any_value(e.ci_high) from evaluations as e join runs as r using (run_id)"
        " left join metrics as m on m.run_id = e.run_id and m.step = e.step and m.name = 'reward/mean'"
        " where e.run_id = ? group by e.step, e.dataset, e.metric order by e.step, e.dataset, e.metric",
        (run_id,),
    ).rows
    points: dict[int, Point] = {}
    for step, at, dataset, metric, value, low, high in rows:
        name = f"{EVALUATION}{dataset}/{metric}"
        point = points.setdefault(step, Point(step, at, {}))
        point.values.update({name: value, f"{name}/low": low, f"{name}/high": high})
    return list(points.values())


def read_ending(home: Home, store: "Store", run: SentRun) -> Ending:
    """Returns the run's present state and its results."""
    state = read_state(home, run.run_id)
    names = ("accuracy_before", "accuracy_after", "score_before", "score_after")
    query = f"select {', '.join(names)} from run_summary where run_id = ?"
    (figures,) = store.query(query, (run.run_id,)).rows
    summary = {**dict(zip(names, figures, strict=True)), "answer": _answer(home, store, run.experiment)}
    known = {name: value for name, value in summary.items() if value not in (None, "")}
    return Ending(status_of(home, run.run_id), state.get("reason") or "", known)


def _answer(home: Home, store: "Store", experiment: str) -> str:
    """Returns the experiment's answer so far, in a few sentences; empty if nothing was evaluated."""
    from pipelines.report.answer.whole import answered
    from pipelines.report.evidence import experiment_groups

    text, found = answered(home, store, experiment, experiment_groups(home, experiment))
    return text if found else ""
