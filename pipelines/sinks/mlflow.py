"""MLflow: each of our runs is an MLflow run, which is found by its tag `rpg.run_id`.

MLflow cannot delete values, so it gets only settled steps; each session begins by asking it which ones it has.
"""

import json
import os
from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import quote

from mlflow.entities import LifecycleStage, Metric, Param, Run
from mlflow.tracking import MlflowClient

from pipelines.home.home import Home
from pipelines.report.evidence import flatten
from pipelines.sinks.record import EVALUATION, Ending, Point, SentRun
from specs.errors import RpgError
from specs.schema.execution import MlflowSink

_RUN_ID = "rpg.run_id"
_AT_ONCE = 1000
"""Largest number of metrics in one request. The limit for parameters is a tenth of it."""
_LONGEST = 6000
"""Largest number of characters of a parameter's value."""
_STATUSES = {"finished": "FINISHED", "running": "RUNNING", "pending": "SCHEDULED", "cancelled": "KILLED"}


class MlflowSession:
    """A session that writes one MLflow run."""

    replaces: ClassVar[bool] = False

    def __init__(self, sink: MlflowSink, run: SentRun, home: Home) -> None:
        default = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{quote(str(home.root / 'mlflow.db'))}"
        # Two sessions that begin at once would both create the database, or the experiment.
        with home.locked("mlflow", waiting=lambda: None):
            self._client = MlflowClient(sink.tracking_uri or default)
            self._run = _find_run(self._client, _experiment_id(self._client, sink.experiment or run.experiment), run)
        self._id = self._run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._send_params(run)

    def held(self) -> tuple[set[int], set[int]]:
        """Returns the steps of all metrics that the run has."""
        metrics: set[int] = set()
        evaluations: set[int] = set()
        for name in self._run.data.metrics:
            steps = {metric.step for metric in self._client.get_metric_history(self._id, name)}
            (evaluations if name.startswith(EVALUATION) else metrics).update(steps)
        return metrics, evaluations

    def send(self, metrics: Sequence[Point], evaluations: Sequence[Point]) -> None:
        """Sends the points. The figures of a step go in one request, so that they arrive together or not at all."""
        batch: list[Metric] = []
        for point in [*metrics, *evaluations]:
            at = int(point.at.timestamp() * 1000)
            figures = [Metric(_metric_name(name), value, at, point.step) for name, value in point.values.items()]
            if len(batch) + len(figures) > _AT_ONCE:
                self._client.log_batch(self._id, metrics=batch)
                batch = []
            batch += figures
        if batch:
            self._client.log_batch(self._id, metrics=batch)

    def close(self, ending: Ending) -> None:
        """Sets the run's status, and its results as tags."""
        for name, value in {"reason": ending.reason, **ending.summary}.items():
            self._client.set_tag(self._id, f"rpg.{name}", str(value))
        self._client.set_terminated(self._id, _STATUSES.get(ending.status, "FAILED"))

    def _send_params(self, run: SentRun) -> None:
        """Sends the resolved spec. MLflow accepts each value only once."""
        known = self._run.data.params
        values = flatten({**run.spec, "seed": run.seed}).items()
        params = [Param(name, _text(value)[:_LONGEST]) for name, value in values if name not in known]
        for start in range(0, len(params), _AT_ONCE // 10):
            self._client.log_batch(self._id, params=params[start : start + _AT_ONCE // 10])


def _experiment_id(client: MlflowClient, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment and experiment.lifecycle_stage == LifecycleStage.DELETED:
        restore = f"mlflow experiments restore --experiment-id {experiment.experiment_id}"
        raise RpgError(f"the experiment `{name}` is deleted in MLflow: `{restore}`, or name another one in the sink")
    return experiment.experiment_id if experiment else str(client.create_experiment(name))


def _find_run(client: MlflowClient, experiment_id: str, run: SentRun) -> Run:
    """Returns the run that an earlier session created, or a new one."""
    earlier = client.search_runs([experiment_id], filter_string=f"tags.`{_RUN_ID}` = '{run.run_id}'")
    if earlier:
        return earlier[0]
    tags = {_RUN_ID: run.run_id, "rpg.experiment": run.experiment, "rpg.objective": run.objective}
    description = {"mlflow.note.content": run.question} if run.question else {}
    return client.create_run(experiment_id, run_name=run.title, tags={**tags, **description})


def _metric_name(name: str) -> str:
    """Replaces the characters that MLflow refuses: `mean@4` becomes `mean_at_4`."""
    return name.replace("@", "_at_")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
