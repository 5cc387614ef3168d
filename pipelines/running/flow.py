"""The one Prefect flow: the stages of one run, in order, as direct task calls in the main thread.

Nothing is submitted: Prefect cannot interrupt a submitted task's thread, and a stage's process would outlive the flow.
`wait_for` gives the dashboard its edges. What is done and what is not is the plan's decision; Prefect is told.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run as this_flow_run
from prefect.runtime import task_run as this_task_run
from prefect.states import Cancelled, Completed, Failed

from pipelines.home import Home
from pipelines.planning.plan import StagePlan
from pipelines.processes.supervisor import StageStoppedError
from pipelines.running import artifacts
from pipelines.running.exit_causes import cause_of_error, difference, may_retry
from pipelines.running.progress import training_line
from pipelines.running.run import Execution, RunBusyError, current
from pipelines.running.stages import Outcome, perform
from rpg.files import read_json
from specs.errors import SpecError

_INGEST_SECONDS = 30.0
_LOG_SECONDS = 10.0


@flow(name="rpg-run", flow_run_name="{name}", validate_parameters=False, persist_result=False)
def run_experiment(name: str, run_id: str, document: dict[str, Any]) -> "State[Any]":
    """Executes one run of an experiment.

    Args:
        name: what the dashboard calls it.
        run_id: which run of the experiment.
        document: the frozen experiment, `Document.to_json()`.
    """
    execution = current() or _opened(run_id, document)
    get_run_logger().info("%s: %s", run_id, name)
    with _signals_noted(execution):
        try:
            with execution.held():
                return _run_held(execution)
        except RunBusyError as busy:
            execution.error = busy
            return Failed(name="Busy", message=str(busy))


def _opened(run_id: str, document: dict[str, Any]) -> Execution:
    """In a worker nobody prepared it."""
    from specs.loader import Document

    home = Home.from_environment()
    return Execution(Document.from_json(document), run_id, home)


def _signals_noted(execution: Execution) -> contextlib.AbstractContextManager[None]:
    if threading.current_thread() is threading.main_thread():
        return execution.stop.on_signals()
    return contextlib.nullcontext()


def _run_held(execution: Execution) -> "State[Any]":
    execution.begin(flow_run_id=this_flow_run.id)
    try:
        artifacts.publish_plan(execution)
        failed = _run_stages(execution)
    except BaseException as error:
        status = "cancelled" if isinstance(error, KeyboardInterrupt) else "failed"
        execution.finish(status, f"{type(error).__name__}: {error}")
        raise
    if failed is None:
        execution.finish("finished")
        return Completed(message=f"{execution.run_id}: all stages done")
    status = "cancelled" if failed.is_cancelled() else "failed"
    execution.finish(status, failed.message or "", cause=cause_of_error(execution.error))
    ending = Cancelled if failed.is_cancelled() else Failed
    return ending(message=failed.message)


def _run_stages(execution: Execution) -> "State[Any] | None":
    """The state of the stage that ended the run early, if one did."""
    states: dict[str, State[Any]] = {}
    for stage in execution.plan.stages:
        policy = getattr(execution.plan.experiment.stages, stage.stage)
        named = run_stage.with_options(
            name=stage.stage,
            task_run_name=stage.stage,
            retries=policy.retries,
            retry_condition_fn=_retry_condition(execution, stage.stage),
            tags=[f"stage:{stage.stage}"],
        )
        upstream = [states[name] for name in stage.inputs]
        state = named(execution, stage, wait_for=upstream, return_state=True)
        states[stage.stage] = state
        if not state.is_completed():
            return state
    return None


@task(name="stage", persist_result=False, cache_policy=NO_CACHE)
def run_stage(execution: Execution, stage: StagePlan) -> "State[Any]":
    """One stage. Prefect sees Completed, Cached, Cancelled or Failed."""
    if this_task_run.run_count > 1:
        _wait_before_retry(execution, stage)
    logger = get_run_logger()
    watch = _Watch(execution, stage)
    try:
        outcome = perform(execution, stage, watch.tick)
    except StageStoppedError as stopped:
        execution.error = stopped
        return Cancelled(message=f"{stage.stage}: {stopped}")
    except Exception as error:
        execution.error = error
        logger.error("%s failed: %s", stage.stage, error_text(error))
        return Failed(message=error_text(error), data=error)
    execution.error = None
    watch.close(outcome)
    if outcome == "cached":
        return Completed(name="Cached", message=stage.reason)
    logger.info("%s done", stage.stage)
    return Completed(message=stage.reason)


def _retry_condition(execution: Execution, stage: str) -> Callable[[Any, Any, Any], bool]:
    """Not what the user has to put right, not what was stopped, and not what would only happen again.

    A plain function: Prefect 3 takes any other callable, a partial for one, as No.
    """

    def condition(_task: Any, _run: Any, _state: Any) -> bool:
        return execution.error is not None and may_retry(execution, stage, execution.error)

    return condition


def _wait_before_retry(execution: Execution, stage: StagePlan) -> None:
    # Not Prefect's retry_delay_seconds: its sleep would not notice a request to stop.
    policy = getattr(execution.plan.experiment.stages, stage.stage)
    deadline = time.monotonic() + policy.retry_delay_seconds
    cause = str(execution.error).splitlines()[0]
    differently = difference(execution, stage.stage)
    execution.progress.note(f"  once more in {policy.retry_delay_seconds:g} s{differently}: {cause}")
    while time.monotonic() < deadline and not execution.stop_requested():
        time.sleep(0.1)


def error_text(error: Exception) -> str:
    """For the record: a user's mistake as the user sees it, anything else in one line with its type."""
    if isinstance(error, SpecError):
        from specs.errors import render

        return render(error.issues, done=error.done)
    return str(error) or type(error).__name__


class _Watch:
    """What happens now and then while a stage works: rows into the database, progress and log lines to Prefect."""

    def __init__(self, execution: Execution, stage: StagePlan) -> None:
        self._execution = execution
        self._training = artifacts.TrainingProgress(execution) if stage.stage == "train" else None
        self._stage = stage.stage
        self._last_ingest = self._last_log = time.monotonic()
        self._last_step = -1
        self._logger = get_run_logger()

    def tick(self) -> None:
        """Called many times a second."""
        if self._training is None:
            return
        progress = read_json(self._execution.directory / "progress.json")
        self._training.update(progress)
        step = progress.get("step", -1)
        if step != self._last_step and time.monotonic() - self._last_log >= _LOG_SECONDS:
            self._last_log, self._last_step = time.monotonic(), step
            self._logger.info(training_line(progress))
        if time.monotonic() - self._last_ingest >= _INGEST_SECONDS:
            self._last_ingest = time.monotonic()
            self._ingest()

    def close(self, outcome: Outcome) -> None:
        """After the stage: what it recorded is shown."""
        if self._training is not None:
            self._training.close()
        if outcome == "done":
            self._ingest()
        if self._stage == "train":
            artifacts.publish_learning_curve(self._execution)
        elif self._stage == "evaluate":
            artifacts.publish_results(self._execution)

    def _ingest(self) -> None:
        """Into the database, if nothing is in the way: queries read from the segments what it lacks."""
        import duckdb
        from filelock import Timeout

        from storage.ingest import ingest

        try:
            ingest(self._execution.home.root, wait_seconds=0)
        except (Timeout, OSError, duckdb.Error) as error:
            self._logger.warning("the database is behind, its rows stay in the segments: %s", error)
