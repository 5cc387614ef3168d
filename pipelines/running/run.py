"""One run being executed: what its flow, its stages and the command that started it share."""

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.home import Home
from pipelines.planning.plan import RunPlan, plan_run
from pipelines.processes.stop import Stop, StopRequest, clear_request
from pipelines.running.progress import ProgressReporter, Silent
from pipelines.state import RunState, write_once
from rpg.files import now, read_json, write_json
from storage.liveness import start_of

if TYPE_CHECKING:
    from specs.loader import Document


class RunBusyError(Exception):
    """Another process executes this run."""


class Execution:
    """A run under way. The plan is made anew here: what another run shared and published meanwhile is cached now."""

    def __init__(
        self,
        document: "Document",
        run_id: str,
        home: Home,
        *,
        stop: Stop | None = None,
        progress: ProgressReporter | None = None,
    ) -> None:
        self.document = document
        self.home = home
        self.run_id = run_id
        self.stop = stop or Stop()
        self.progress = progress or Silent()
        self.error: Exception | None = None
        """What ended it, if anything did; for the command that waits for it."""
        self.plan = plan_run(document, run_id, home)
        self.state = RunState(home, run_id)
        self._before = ("", "")
        self._ended_before: str | None = None

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.home.run(self.run_id)

    def stop_requested(self) -> StopRequest | None:
        """A signal to this process, or a cancel request for this run."""
        return self.stop.requested(self.directory)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the run: one process at a time. Raises RunBusyError naming the other one."""
        with self.home.locked(f"run-{self.run_id}", waiting=self._refuse):
            try:
                clear_request(self.home, self.run_id)
                # Read again: the process that held it before us may have gone on since.
                self.state = RunState(self.home, self.run_id)
                yield
            finally:
                clear_request(self.home, self.run_id)

    def _refuse(self) -> None:
        pid = read_json(self.directory / "state.json").get("pid")
        raise RunBusyError(
            f"{self.run_id} is being run by process {pid or '(starting)'}; "
            f"`rpg watch {self.run_id}` follows it, `rpg cancel {self.run_id}` stops it"
        )

    def begin(self, flow_run_id: str | None) -> None:
        """Records that this process executes the run from now on."""
        register_run(self.home, self.document, self.plan)
        write_json(self.directory / "plan.json", self.plan.record())
        self._before = (self.state.status, self._work())
        self._ended_before = self.state.record["ended_at"]
        self.state.update(
            status="running",
            reason="",
            cause=None,
            started_at=self.state.record["started_at"] or now(),
            ended_at=None,
            pid=os.getpid(),
            pid_started=start_of(os.getpid()),
            host=socket.gethostname(),
            flow_run_id=flow_run_id,
        )

    def finish(self, status: str, reason: str = "", *, cause: str | None = None) -> None:
        """Records how it ended. Where a finished run was only looked at again, it keeps the time it ended."""
        untouched = status == "finished" and self._before == ("finished", self._work())
        ended_at = self._ended_before if untouched else now()
        self.state.update(status=status, reason=reason, cause=cause, ended_at=ended_at, pid=None, pid_started=None)

    def _work(self) -> str:
        return json.dumps(self.state.record["stages"], sort_keys=True)


def register_run(home: Home, document: "Document", plan: RunPlan) -> None:
    """Writes what a run is (run.json, once) and the spec that its trainer reads."""
    experiment = plan.experiment
    record = {
        "run_id": plan.run_id,
        "experiment": experiment.name,
        "name": plan.name,
        "seed": plan.seed,
        "values": plan.values,
        "question": experiment.question,
        "created_at": now(),
        "fingerprints": {stage.stage: stage.fingerprint for stage in plan.stages},
        "objective": experiment.objective.type,
    }
    write_once(home.run(plan.run_id) / "run.json", record)
    write_json(home.run(plan.run_id) / "spec.json", experiment.model_dump(mode="json"))
    write_json(home.run(plan.run_id) / "document.json", document.to_json())


def register_experiment(home: Home, document: "Document", runs: tuple[RunPlan, ...]) -> None:
    """Writes the experiment's record, with all runs it ever had, and its frozen document."""
    experiment = document.experiment
    directory = home.experiment(experiment.name)
    before = read_json(directory / "experiment.json")
    listed = [run_id for run_id in before.get("runs", []) if run_id not in {run.run_id for run in runs}]
    frozen = document.to_json()
    record = {
        "name": experiment.name,
        "question": experiment.question,
        "runs": listed + [run.run_id for run in runs],
        "current": [run.run_id for run in runs],
        "labels": {run.run_id: run.label for run in runs if run.label},
        "created_at": before.get("created_at") or now(),
        "updated_at": now(),
        "fingerprint": hashlib.sha256(json.dumps(frozen["experiment"], sort_keys=True).encode()).hexdigest(),
    }
    write_json(directory / "experiment.json", record)
    write_json(directory / "spec.json", frozen)


_current: ContextVar[Execution | None] = ContextVar("execution", default=None)


def current() -> Execution | None:
    """The execution that a command prepared for the flow it is about to call; None in a worker."""
    return _current.get()


@contextmanager
def prepared(execution: Execution) -> Iterator[None]:
    """Hands an execution to the flow called inside."""
    token = _current.set(execution)
    try:
        yield
    finally:
        _current.reset(token)
