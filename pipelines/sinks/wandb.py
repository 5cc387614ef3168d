"""Weights & Biases: each of our runs is a W&B run with the same id, which every session rewrites completely.

An offline run cannot be continued: W&B gives each session a directory, and the last synced one of those with the same
id replaces the others. So a session writes the whole run, and deletes the directories of earlier ones. Online too, a
run that begins with the id of another replaces it: so withdrawn records disappear there too.
"""

import shutil
from collections.abc import Sequence
from typing import ClassVar

import wandb

from pipelines.home.home import Home
from pipelines.sinks.record import Ending, Point, SentRun
from specs.schema.execution import WandbSink

_STEP = "step"
"""Name of the x-axis of every figure. W&B's own step counts rows, and rejects a row with an earlier step."""
_EXIT_CODES = {"finished": 0, "running": 0, "pending": 0, "cancelled": 255}
"""Exit codes for which W&B shows a run as finished or killed. It shows others as failed."""


class WandbSession:
    """A session that writes one W&B run."""

    replaces: ClassVar[bool] = True

    def __init__(self, sink: WandbSink, run: SentRun, home: Home) -> None:
        home.wandb.mkdir(exist_ok=True)
        self._earlier = home.offline_wandb(run.run_id)
        self._run = wandb.init(
            id=run.run_id,
            project=sink.project,
            entity=sink.entity or None,
            group=run.experiment,
            name=run.title,
            notes=run.question or None,
            tags=[*sink.tags, *run.tags],
            config={**run.spec, "run_id": run.run_id, "seed": run.seed, "cell": run.cell},
            dir=str(home.root),
            reinit="create_new",
            mode="offline" if sink.mode == "offline" else None,  # otherwise WANDB_MODE may decide
            # Data that W&B would collect by itself are about this process, not about training.
            settings=wandb.Settings(
                console="off",
                silent=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
                disable_code=True,
                disable_git=True,
            ),
        )
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("*", step_metric=_STEP)

    def held(self) -> tuple[set[int], set[int]]:
        """Returns no steps, because the run is rewritten."""
        return set(), set()

    def send(self, metrics: Sequence[Point], evaluations: Sequence[Point]) -> None:
        """Passes the points to W&B, which sends them from a separate process."""
        for point in [*metrics, *evaluations]:
            self._run.log({_STEP: point.step, "_timestamp": point.at.timestamp(), **point.values})

    def close(self, ending: Ending) -> None:
        """Writes status and results to the run's summary, and waits until everything is sent."""
        self._run.summary.update({"status": ending.status, "reason": ending.reason, **ending.summary})
        self._run.finish(exit_code=_EXIT_CODES.get(ending.status, 1))
        for directory in self._earlier:
            shutil.rmtree(directory, ignore_errors=True)
