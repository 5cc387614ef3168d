"""Evaluation during training: a separate process measures each checkpoint once it is exported.

The launcher starts it like the evaluate stage, in its own directory below the run's, with its own spec: other ranks and
GPU slots than training's, which it holds only while it works. It ends when it has measured the exported checkpoints.
The evaluate stage reuses its results and measures the rest, so that no failure here ends training: a failed evaluation
is retried as often as `stages.evaluate` says, and then left to that stage.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pipelines.launchers import concurrent_directory, job_file, launcher_of, launchers, problems_file
from pipelines.processes.forking import forks_stages
from pipelines.processes.supervisor import (
    TIMEOUT_GRACE_SECONDS,
    Child,
    RunningChild,
    StageError,
    failure,
    log_size,
    log_tail,
    started,
)
from pipelines.running.failures import cause_of_error
from pipelines.running.gpu_slots import evaluates_in_ranks, slot_environment, slots_of_evaluation
from pipelines.running.run import RunExecution
from rpg.evaluation.results import ConcurrentResults
from rpg.recording.run_directory import RunDirectory
from specs.machine.exit_cause import RETRIED, USER_ERROR, cause_in
from specs.machine.files import DiskError, write_json
from specs.machine.gpu_slots import TooFewSlotsError, leased, slots_here
from specs.machine.timed_output import TIMED

_LOOK_SECONDS = 2.0
"""Seconds between two checks for exported weights."""
_SLOT_SECONDS = 10.0
"""Seconds between two checks for free slots."""


@contextmanager
def evaluating(execution: RunExecution) -> Iterator[Callable[[], None]]:
    """Evaluates checkpoints within the block, if the spec says so. No evaluation continues after the block.

    A run that is to pause evaluates its policy at the pause by itself.

    Yields:
        A function to call many times a second, in the main thread.
    """
    if not execution.plan.experiment.evaluation.concurrent_ranks or execution.until:
        yield lambda: None
        return
    evaluation = _ConcurrentEvaluation(execution)
    try:
        yield evaluation.look
    finally:
        evaluation.close()


def forget_results(run_directory: Path) -> None:
    """Removes the results from concurrent evaluation, which the evaluate stage now has. Ends a job that a killed
    command has left."""
    if (run_directory / "concurrent").exists():
        for launcher in launchers():
            launcher.end(concurrent_directory(run_directory))
        shutil.rmtree(run_directory / "concurrent", ignore_errors=True)


class _ConcurrentEvaluation:
    """Evaluation of exported weights that have no results yet, in one process at a time."""

    def __init__(self, execution: RunExecution) -> None:
        self._execution = execution
        self._experiment = execution.plan.experiment.concurrent_evaluation
        self._launcher = launcher_of(self._experiment)
        self._stage = execution.plan.stage("evaluate")
        self._run = RunDirectory(execution.directory.absolute())
        self._results = ConcurrentResults(self._run.path, self._stage.fingerprint)
        self._num_slots = slots_of_evaluation(self._experiment)
        self._slots = slots_here() if self._num_slots else []
        self._look_at = 0.0
        """Monotonic time of the next check."""
        self._failures = 0
        """Consecutive failures."""
        self._told_of_slots = False
        self._child: RunningChild | None = None
        self._log = execution.directory / "logs" / "evaluate-concurrent.log"
        self._log_start = 0
        self._begun: list[dict[str, Any]] = []
        """The weights that the process is measuring."""
        self._holding = ExitStack()
        """The process and its slots."""

    def look(self) -> None:
        """Begins to measure new weights, or checks whether the process has ended. Raises only training's own errors."""
        try:
            if self._child is not None:
                self._look_at_child(self._child)
            elif time.monotonic() >= self._look_at and (exported := self._due()):
                self._begin(exported)
        except TooFewSlotsError as busy:
            self._wait_for_slots(str(busy))
        except (StageError, DiskError, OSError) as error:
            self._fail(error)

    def close(self) -> None:
        """Ends the process. Its results stay. The evaluate stage does the unfinished measurements."""
        if self._child and self._launcher.outlives_command and not self._execution.superseded:
            # If the process were killed before it has noted the job that it submits, the job would be unknown.
            self._child.end(TIMEOUT_GRACE_SECONDS)
        self._child = None
        self._holding.close()

    def _wait_for_slots(self, reason: str) -> None:
        """Delays the next check, and reports the reason once."""
        self._wait(_SLOT_SECONDS)
        if not self._told_of_slots:
            self._told_of_slots = True
            self._execution.warn(f"evaluation waits for GPU slots or the end of training: {reason}")

    def _due(self) -> list[dict[str, Any]]:
        """Returns exported weights without results, in the form that `rpg.stage` expects: the base model, and the steps
        before the last."""
        self._wait(_LOOK_SECONDS)
        experiment = self._execution.plan.experiment
        wanted, every = experiment.evaluation.checkpoints, experiment.training.export_every_steps
        attempts = [int(file.stem) for file in (self._run.path / "attempts").glob("[0-9]*.json")]
        due = []
        if wanted != "final" and attempts and not self._results.attempt(0):
            due.append((0, self._execution.plan.stage("base").output.absolute(), max(attempts)))
        if wanted == "all" and every:
            by_trainer = self._run.evaluated()  # at the step at which the run has paused
            due += [
                (step, self._run.weights / f"step-{step:06}", attempt)
                for step, attempt in sorted(self._run.exported().items())
                if step < experiment.training.steps and step % every == 0 and step not in by_trainer
                if self._results.attempt(step) != attempt
            ]
        return [
            {"step": step, "weights": str(path), "attempt": attempt} for step, path, attempt in due if path.is_dir()
        ]

    def _begin(self, exported: list[dict[str, Any]]) -> None:
        """Starts a process that measures these weights. Raises TooFewSlotsError if too few slots are free."""
        directory = concurrent_directory(self._run.path)
        with ExitStack() as holding:
            holder = f"{self._execution.run_id} (evaluate)"
            slots = holding.enter_context(leased(self._num_slots, holder, waiting=None, available=self._slots))
            job = self._write_job(directory, exported)
            forks = not evaluates_in_ranks(self._experiment) and forks_stages(self._experiment, slots)
            command = [sys.executable, "-P", "-m", "rpg.stage", str(job)]
            if evaluates_in_ranks(self._experiment):
                command = self._launcher.command(directory, self._experiment, slots, stage="evaluate")
            self._log_start, self._begun = log_size(self._log), exported
            child = Child(
                stage="evaluate",
                command=command,
                log=self._log,
                record=directory / "process.json",
                timeout_seconds=self._experiment.stages.evaluate.timeout_seconds,
                environment={TIMED: "1", **slot_environment(slots)},
                forks=forks,
                afterwards=lambda: None if self._execution.superseded else self._launcher.end(directory),
            )
            self._child = holding.enter_context(started(child))
            self._holding = holding.pop_all()

    def _write_job(self, directory: Path, exported: list[dict[str, Any]]) -> Path:
        """Writes the input of the launcher and of the process. Returns the job's file."""
        execution, job = self._execution, job_file(directory, "evaluate")
        spec = self._experiment.model_dump(mode="json")
        inputs = {name: str(execution.plan.stage(name).output.absolute()) for name in ("data", "base")}
        lease = None if self._launcher.outlives_command else execution.lease
        description = {
            "stage": "evaluate_exported",
            "spec": spec,
            "inputs": inputs | {"run": str(self._run.path)},
            "out": str(self._results.directory),
            "problems": str(problems_file(directory, "evaluate")),
            "run_id": execution.run_id,
            "fingerprint": self._stage.fingerprint,
            "exported": exported,
            "lease": lease.number if lease else 0,
        }
        write_json(directory / "spec.json", spec)
        write_json(job, description)
        return job

    def _look_at_child(self, child: RunningChild) -> None:
        """Frees the process's slots once it has ended. Raises StageError if it failed, or if all its weights still lack
        results. (Weights that training has exported again meanwhile get no result.)"""
        code = child.poll()
        if code is None:
            return
        self.close()
        if code:
            error = failure("evaluate", code, self._log, since=self._log_start)
            tail = log_tail(self._log, 60, since=self._log_start)
            error.cause = "user_error" if code == USER_ERROR else cause_in(tail)
            raise error
        measured = [
            policy["step"] for policy in self._begun if self._results.attempt(policy["step"]) == policy["attempt"]
        ]
        if not measured:
            if any(policy in self._begun for policy in self._due()):
                raise StageError("evaluate has measured nothing", self._log)
            return
        self._failures = 0
        self._execution.outbox.log(f"evaluated during training: steps {', '.join(map(str, measured))}")

    def _fail(self, error: Exception) -> None:
        """Reports that an evaluation failed. Begins no further one after `stages.evaluate.retries` more failures in
        a row, or after a failure that would recur."""
        self.close()
        self._failures += 1
        policy = self._experiment.stages.evaluate
        again = self._failures <= policy.retries and cause_of_error(error) in RETRIED
        self._wait(policy.retry_delay_seconds if again else float("inf"))
        what_now = (
            f"retrying in {policy.retry_delay_seconds:g} s" if again else "checkpoints are evaluated after training"
        )
        cause = (str(error).splitlines() or [type(error).__name__])[0].partition("; the end of ")[0]
        self._execution.warn(f"evaluation during training: {cause} (logs/{self._log.name}); {what_now}")

    def _wait(self, seconds: float) -> None:
        self._look_at = time.monotonic() + seconds
