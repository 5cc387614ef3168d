"""Trackio: a run of ours is a Trackio run of the same id, in a project's database in the home.

Trackio's `log` stamps a row with the time of the call and only warns if it cannot be stored. So a session writes to
Trackio's database by its storage class: rows with their time of recording, and an error if one is lost. Each session
writes the whole run, so withdrawn records disappear.
"""

import os
from collections.abc import Sequence
from typing import ClassVar

from pipelines.home.home import Home
from pipelines.sinks.record import Ending, Point, SentRun
from specs.schema.execution import TrackioSink

_LEVELS = {"finished": "info", "running": "info", "pending": "info", "cancelled": "warn"}
"""Levels of the alert with a run's status; any other status is an error."""


class TrackioSession:
    """A session that writes one Trackio run."""

    replaces: ClassVar[bool] = True

    def __init__(self, sink: TrackioSink, run: SentRun, home: Home) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(home.root / "trackio"))  # the library reads it when it is imported
        from trackio.sqlite_storage import SQLiteStorage

        self._storage = SQLiteStorage
        self._project = sink.project or run.experiment
        self._storage.validate_project_name(self._project)
        self._run = {"run": run.title, "run_id": run.run_id}
        description = {"question": run.question, "tags": list(run.tags), "seed": run.seed, "cell": run.cell}
        self._config = {**run.spec, **description, "run_id": run.run_id, "_Group": run.experiment}
        self._storage.delete_run(self._project, **self._run)
        if self._storage.get_log_count(self._project, **self._run):
            raise RuntimeError(f"the earlier copy of {run.run_id} could not be deleted")  # its errors are swallowed

    def held(self) -> tuple[set[int], set[int]]:
        """Returns no steps: the run is rewritten."""
        return set(), set()

    def send(self, metrics: Sequence[Point], evaluations: Sequence[Point]) -> None:
        """Writes the points, with their times of recording."""
        points = [*metrics, *evaluations]
        self._storage.bulk_log(
            self._project,
            metrics_list=[point.values for point in points],
            steps=[point.step for point in points],
            timestamps=[point.at.isoformat() for point in points],
            config=self._config,
            **self._run,
        )

    def close(self, ending: Ending) -> None:
        """Writes status and results as an alert of the run."""
        results = [f"{name}: {value}" for name, value in {"reason": ending.reason, **ending.summary}.items() if value]
        level = _LEVELS.get(ending.status, "error")
        self._storage.bulk_alert(
            self._project, titles=[ending.status], texts=["\n".join(results)], levels=[level], steps=[None], **self._run
        )
