"""A run under way: the state that its flow, its stages and the command share, and its records."""

import hashlib
import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.home.home import Home
from pipelines.home.state import RunState, write_once
from pipelines.home.versions import versions_in, with_runs
from pipelines.planning.plan import RunPlan, plan_run
from pipelines.processes.reap import end_left_process
from pipelines.processes.stop import Stop, StopRequest, clear_request
from pipelines.remote.sharing import shared_run
from pipelines.running.messages import Messages
from pipelines.running.progress import ProgressReporter, Silent
from pipelines.running.sinks import SinkProcesses
from pipelines.sinks.sending import is_behind
from specs.machine.files import now, read_json, replacing, write_json
from specs.machine.lease import Lease, acquire
from specs.machine.liveness import start_of
from specs.origins import origins_of
from specs.records import EVALUATION

if TYPE_CHECKING:
    from specs.loader import Document


WORKER = "RPG_WORKER"
"""Environment variable with the name of the worker that started this process."""


class RunExecution:
    """A run that this process executes or is about to execute.

    Its plan is made here again: a stage that another run has published since the experiment was planned is cached now.
    """

    def __init__(
        self,
        document: "Document",
        run_id: str,
        home: Home,
        *,
        stop: Stop | None = None,
        progress: ProgressReporter | None = None,
        until: int = 0,
        in_study: bool = False,
    ) -> None:
        """
        Args: until: the training step at which the run pauses; 0, or the last step or a later one, means no pause.
        in_study: whether the run belongs to a study, whose page replaces the experiment's. The experiment's page would
        compare all trials whenever one ends.
        """
        self.document = document
        self.home = home
        self.run_id = run_id
        self.stop = stop or Stop()
        self.progress = progress or Silent()
        self.error: Exception | None = None
        """The error that ended the run early, if any. The command that waits for the run reads it."""
        self.plan = plan_run(document, run_id, home)
        self.in_study = in_study
        self.until = until if until < self.plan.experiment.training.steps else 0
        self.state = RunState(home, run_id)
        self.shared = shared_run(home, run_id)
        """The run in an object store; None if the run is only in its home, or if all workers share the home."""
        self.lease: Lease | None = None
        """The lease while this process holds the run, else None."""
        self.outbox = Messages()
        """Messages to Prefect. The flow replaces the queue by its own."""
        self.sinks = SinkProcesses(home, run_id, ())
        """Processes that send the run's records. After the run has begun, there is one for each sink that lacks
        records."""
        self.begun = False

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.home.run(self.run_id)

    @property
    def superseded(self) -> bool:
        """Whether another process has taken over the run, so that this process may no longer change it."""
        return self.lease is not None and self.lease.superseded

    def check_lease(self) -> None:
        """Raises SupersededError if another process has taken over the run."""
        if self.lease:
            self.lease.fence.check()

    def stop_requested(self) -> StopRequest | None:
        """Returns the request to stop that is in force now: a signal to this process, or a request for this run in its
        directory or on the server.

        Raises:
            SupersededError: the run was taken over by another process, so that this one has to end at once.
        """
        self.check_lease()
        return self.stop.requested(self.directory) or self.outbox.request

    def warn(self, text: str) -> None:
        """Warns the command and the server of a problem that the run does not depend on."""
        self.progress.note(f"  {text}")
        self.outbox.log(text, level=logging.WARNING)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the run, which only one process may do at a time, and ends the processes that a dead process, which
        held the run before, has left.

        Raises:
            RunBusyError: another process executes the run; the message says which.
        """
        worker = os.environ.get(WORKER, "")
        held = self.shared.held(worker, self._others()) if self.shared else acquire(self.directory, worker=worker)
        with held as lease:
            self.lease = lease
            if self.shared:  # stages that another machine has finished are finished here now
                self.plan = plan_run(self.document, self.run_id, self.home)
            if lease.is_takeover:
                for left in end_left_process(self.directory):
                    self.warn(f"ended {left.stage} {left.pid}, left by the process that held the run before")
            # Without a new command a worker resumes a dead flow's run: that flow's settings still hold.
            if not (lease.is_takeover and WORKER in os.environ):
                clear_request(self.directory)
            # Read again: the process that held it before may have progressed since.
            self.state = RunState(self.home, self.run_id, lease.fence)
            try:
                yield
            finally:
                if not self.superseded:
                    clear_request(self.directory)

    def _others(self) -> list[str]:
        """Returns the other directories that the run needs or belongs to, by path in the home."""
        outputs = [self.plan.stage(name).output for name in ("data", "base")]
        return [
            f"experiments/{self.document.experiment.name}",
            *(output.relative_to(self.home.root).as_posix() for output in outputs),
        ]

    def begin(self, flow_run_id: str | None) -> None:
        """Records that this process executes the run from now on."""
        register_run(self.home, self.document, self.plan)
        _join_experiment(self.home, self.document, self.plan)
        write_json(self.directory / "plan.json", self.plan.record())
        self.begun = True
        adds = any(stage.action == "RUN" for stage in self.plan.stages)
        lacking = [sink for sink in self.plan.experiment.sinks if adds or is_behind(self.home, self.run_id, sink)]
        self.sinks = SinkProcesses(self.home, self.run_id, lacking)
        self.state.begin(
            pid=os.getpid(),
            pid_started=start_of(os.getpid()),
            host=socket.gethostname(),
            flow_run_id=flow_run_id,
            api_url=self._server(flow_run_id),
        )

    def _server(self, flow_run_id: str | None) -> str:
        """Returns the server of the flow run that a worker received; empty for a command's own flow run, which does not
        wait on a server."""
        before = self.state.record
        if flow_run_id == before["flow_run_id"] or WORKER not in os.environ:
            return str(before.get("api_url") or "")
        return os.environ.get("PREFECT_API_URL", "")


def register_run(home: Home, document: "Document", plan: RunPlan) -> None:
    """Writes the run's identity (run.json, once), the spec that its trainer reads, the document that it came from,
    and the origin of each value of the spec (provenance.json)."""
    register_runs(home, document, [plan], durable=True)


def register_runs(home: Home, document: "Document", plans: Iterable[RunPlan], *, durable: bool) -> None:
    """Writes the records of several runs of one document, like `register_run` for one.

    Args:
        durable: wait until each file is on the disk, about 10 ms a run. Not needed for runs that are only submitted:
            the flow of each writes its records again when it begins.
    """
    frozen = json.dumps(document.to_json(), ensure_ascii=False, allow_nan=False)
    for plan in plans:
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
            **({"objective": experiment.objective.type} if experiment.trains else {"kind": EVALUATION}),
        }
        directory = home.run(plan.run_id)
        write_once(directory / "run.json", record, durable=durable)
        write_json(directory / "spec.json", experiment.model_dump(mode="json"), durable=durable)
        origins = [origin.to_json() for origin in origins_of(document, plan.values, experiment)]
        texts = {"document.json": frozen, "provenance.json": json.dumps({"origins": origins}, ensure_ascii=False)}
        for name, text in texts.items():
            with replacing(directory / name, durable=durable) as aside:
                aside.write_text(text, encoding="utf-8")


def register_experiment(
    home: Home, document: "Document", runs: tuple[RunPlan, ...], *, in_addition: bool = False
) -> None:
    """Writes the experiment's record, which lists all its runs of all versions, and its frozen document.

    Args:
        in_addition: the runs join the experiment's present ones, like a study's trials; if not, the version with their
            cells becomes the present one.
    """
    with home.locked(f"experiment-{document.experiment.name}", waiting=lambda: None):
        _register_experiment(home, document, runs, in_addition)


def _join_experiment(home: Home, document: "Document", run: RunPlan) -> None:
    """Adds a run to its experiment's record if it is missing there. It is missing if it was submitted from a machine
    with another home."""
    with home.locked(f"experiment-{document.experiment.name}", waiting=lambda: None):
        recorded = read_json(home.experiment(document.experiment.name) / "experiment.json")
        if run.run_id not in recorded.get("runs", []):
            same_spec = recorded.get("fingerprint") == _fingerprint(document)
            _register_experiment(home, document, (run,), in_addition=same_spec)


def _fingerprint(document: "Document") -> str:
    """Returns the fingerprint of an experiment's whole spec, including directories and machines."""
    return hashlib.sha256(json.dumps(document.to_json()["experiment"], sort_keys=True).encode()).hexdigest()


def _register_experiment(home: Home, document: "Document", runs: tuple[RunPlan, ...], in_addition: bool) -> None:
    experiment = document.experiment
    directory = home.experiment(experiment.name)
    before = read_json(directory / "experiment.json")
    run_ids = [run.run_id for run in runs]
    listed = [run_id for run_id in before.get("runs", []) if run_id not in run_ids]
    recipes = {run.recipe for run in runs}
    last_number = before.get("last_version", 0)
    versions = with_runs(versions_in(before), recipes, run_ids, in_addition=in_addition, last_number=last_number)
    record = {
        "name": experiment.name,
        "question": experiment.question,
        "runs": listed + run_ids,
        "current": list(versions[-1].runs),
        "versions": [version.to_json() for version in versions],
        "labels": before.get("labels", {}) | {run.run_id: run.label for run in runs if run.label},
        "created_at": before.get("created_at") or now(),
        "updated_at": now(),
        "fingerprint": _fingerprint(document),
        **({"last_version": last_number} if last_number else {}),
    }
    write_json(directory / "experiment.json", record)
    write_json(directory / "spec.json", document.to_json())
