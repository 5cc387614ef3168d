"""The Prefect flow of a run: its stages in order, each a direct task call in the main thread.

No task is submitted: Prefect cannot interrupt the thread of a submitted task, so that a stage's process would outlive
the flow. `wait_for` draws the edges of the dashboard's graph. Whether a stage is cached is decided by our own
fingerprints; Prefect is only told.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import TagsContext
from prefect.exceptions import Abort
from prefect.runtime import flow_run as this_flow_run
from prefect.runtime import task_run as this_task_run
from prefect.states import Cancelled, Completed, Failed

from pipelines.home import Home
from pipelines.planning.plan import StagePlan
from pipelines.processes.lease import RunBusyError
from pipelines.processes.supervisor import StagePausedError, StageStoppedError
from pipelines.running import dashboard, frozen
from pipelines.running.failures import cause_of_error, may_retry, retry_difference
from pipelines.running.progress import training_line
from pipelines.running.run import RunExecution
from pipelines.running.stages import StageOutcome, perform_stage
from rpg.files import read_json
from rpg.processes.fence import SupersededError
from rpg.processes.redacted_log import redact_log_records
from specs.errors import SpecError
from specs.loader import Document
from specs.secrets import hide

PAUSED = "Paused"
"""What Prefect calls the state of a stage and of a run that wait to go on: for Prefect they are completed."""
_INGEST_SECONDS = 30.0
_LOG_SECONDS = 10.0
_handed_over: ContextVar[RunExecution | None] = ContextVar("handed_over", default=None)


def call_flow(execution: RunExecution, name: str) -> "State[Any]":
    """Calls the flow in this process for an execution that the caller keeps. Returns the flow's last state.

    Args:
        name: what the dashboard calls the flow run.
    """
    token = _handed_over.set(execution)
    try:
        digest = frozen.digest_of(execution.document.to_json())
        state: State[Any] = execute_run(name, execution.run_id, digest, execution.until, return_state=True)
        return state
    finally:
        _handed_over.reset(token)


@flow(name="rpg-run", flow_run_name="{name}", validate_parameters=False, persist_result=False)
def execute_run(name: str, run_id: str, document: str | dict[str, Any], until: int = 0) -> "State[Any]":
    """Executes one run of an experiment. A Prefect worker calls it with these parameters.

    Args:
        name: what the dashboard calls the flow run.
        run_id: which run of the experiment.
        document: the digest of the frozen experiment, which the server keeps; or the frozen experiment itself,
            `Document.to_json()`, as earlier versions sent it.
        until: see RunExecution.
    """
    redact_log_records()
    execution = _handed_over.get()
    if execution is None:
        given = frozen.fetch(document) if isinstance(document, str) else document
        execution = RunExecution(Document.from_json(given), run_id, Home.from_environment(), until=until)
    get_run_logger().info("%s: %s", run_id, name)
    with _signals_noted(execution):
        try:
            with execution.held():
                return _execute_and_record(execution)
        except RunBusyError as busy:
            execution.error = busy
            if execution.state.record["flow_run_id"] == str(this_flow_run.id):
                raise Abort(str(busy)) from None  # the other process executes this same flow run and tells its state
            return Failed(name="Busy", message=str(busy))
        except SupersededError as superseded:
            execution.error = superseded
            if _handed_over.get() is None:
                # The process that took the run over executes this same flow run and tells its state.
                raise Abort(str(superseded)) from None
            return Cancelled(name="Superseded", message=str(superseded))


def _signals_noted(execution: RunExecution) -> contextlib.AbstractContextManager[None]:
    if threading.current_thread() is threading.main_thread():
        return execution.stop.on_signals()
    return contextlib.nullcontext()


def _execute_and_record(execution: RunExecution) -> "State[Any]":
    execution.begin(flow_run_id=this_flow_run.id)
    try:
        dashboard.publish_plan(execution)
        early = _run_stages(execution)
    except BaseException as error:
        status = "cancelled" if isinstance(error, KeyboardInterrupt) else "failed"
        execution.finish(status, f"{type(error).__name__}: {error}")
        raise
    if early is None:
        execution.finish("finished")
        return Completed(message=f"{execution.run_id}: all stages done")
    if early.name == PAUSED:
        execution.finish("cancelled", early.message or "")
        return Completed(name=PAUSED, message=early.message)
    status = "cancelled" if early.is_cancelled() else "failed"
    execution.finish(status, early.message or "", cause=cause_of_error(execution.error))
    ending = Cancelled if early.is_cancelled() else Failed
    return ending(message=early.message)


def _run_stages(execution: RunExecution) -> "State[Any] | None":
    """Calls the task of each stage. Returns the state of the stage that ended the run early, if one did."""
    states: dict[str, State[Any]] = {}
    for stage in execution.plan.stages:
        policy = getattr(execution.plan.experiment.stages, stage.stage)
        task_of_stage = run_stage.with_options(
            name=stage.stage,
            task_run_name=stage.stage,
            retries=policy.retries,
            retry_condition_fn=_retry_condition(execution, stage.stage),
        )
        upstream = [states[name] for name in stage.inputs]
        # For each tag of a task Prefect asks the server for a slot: 1.6 s a stage. The flow run keeps the run's tags.
        with TagsContext(current_tags=set()):
            state = task_of_stage(execution, stage, wait_for=upstream, return_state=True)
        states[stage.stage] = state
        if not state.is_completed() or state.name == PAUSED:
            return state
    return None


@task(name="stage", persist_result=False, cache_policy=NO_CACHE)
def run_stage(execution: RunExecution, stage: StagePlan) -> "State[Any]":
    """Does one stage. Prefect sees Completed, Cached, Paused, Cancelled or Failed."""
    if this_task_run.run_count > 1:
        _wait_before_retry(execution, stage)
    logger = get_run_logger()
    reporter = _StageReporter(execution, stage)
    try:
        outcome = perform_stage(execution, stage, reporter.tick)
    except StagePausedError as paused:
        execution.error = paused
        reporter.close("paused")
        return Completed(name=PAUSED, message=str(paused))
    except StageStoppedError as stopped:
        execution.error = stopped
        return Cancelled(message=f"{stage.stage}: {stopped}")
    except SupersededError as superseded:
        execution.error = superseded
        return Cancelled(name="Superseded", message=str(superseded))
    except Exception as error:
        execution.error = error
        logger.error("%s failed: %s", stage.stage, error_text(error))
        return Failed(message=error_text(error), data=error)
    execution.error = None
    reporter.close(outcome)
    if outcome == "cached":
        return Completed(name="Cached", message=stage.reason)
    logger.info("%s done", stage.stage)
    return Completed(message=stage.reason)


def _retry_condition(execution: RunExecution, stage: str) -> Callable[[Any, Any, Any], bool]:
    """Tells Prefect whether to try again: not after a user's mistake, a stop, or what would only happen again.

    The condition has to be a plain function: Prefect 3 takes any other callable, such as a partial, for a No.
    """

    def condition(_task: Any, _run: Any, _state: Any) -> bool:
        return execution.error is not None and may_retry(execution, stage, execution.error)

    return condition


def _wait_before_retry(execution: RunExecution, stage: StagePlan) -> None:
    # Not Prefect's retry_delay_seconds: its sleep would not notice a request to stop.
    policy = getattr(execution.plan.experiment.stages, stage.stage)
    deadline = time.monotonic() + policy.retry_delay_seconds
    cause = str(execution.error).splitlines()[0]
    differently = retry_difference(execution, stage.stage)
    execution.progress.note(f"  once more in {policy.retry_delay_seconds:g} s{differently}: {cause}")
    while time.monotonic() < deadline and not execution.stop_requested():
        time.sleep(0.1)


def error_text(error: Exception) -> str:
    """An error's text for the record: a user's mistake as the user sees it, of any other error its message."""
    if isinstance(error, SpecError):
        from specs.errors import render

        return hide(render(error.issues, done=error.done))
    return hide(str(error)) or type(error).__name__


class _StageReporter:
    """While a stage works: ingests its rows and sends its progress and a log line to Prefect, each now and then."""

    def __init__(self, execution: RunExecution, stage: StagePlan) -> None:
        self._execution = execution
        self._progress_bar = dashboard.ProgressBar(execution) if stage.stage == "train" else None
        self._stage = stage.stage
        self._last_ingest = self._last_log = time.monotonic()
        self._last_step = -1
        self._logger = get_run_logger()

    def tick(self) -> None:
        """Called many times a second."""
        if self._progress_bar is None:
            return
        progress = read_json(self._execution.directory / "progress.json")
        self._progress_bar.update(progress)
        step = progress.get("step", -1)
        if step != self._last_step and time.monotonic() - self._last_log >= _LOG_SECONDS:
            self._last_log, self._last_step = time.monotonic(), step
            self._logger.info(training_line(progress))
        if time.monotonic() - self._last_ingest >= _INGEST_SECONDS:
            self._last_ingest = time.monotonic()
            self._ingest()

    def close(self, outcome: StageOutcome | Literal["paused"]) -> None:
        """Shows on the dashboard what the stage recorded."""
        if self._progress_bar is not None and outcome != "paused":
            self._progress_bar.close()
        if outcome != "cached":
            self._ingest()
        if self._stage == "train":
            dashboard.publish_learning_curve(self._execution)
        elif self._stage == "evaluate":
            dashboard.publish_results(self._execution)

    def _ingest(self) -> None:
        """Brings the database up to date if no other ingester is at work: queries read the rest from the segments."""
        import duckdb
        from filelock import Timeout

        from storage.ingest import ingest

        try:
            ingest(self._execution.home.root, wait_seconds=0)
        except (Timeout, OSError, duckdb.Error) as error:
            self._logger.warning("the database is behind, its rows stay in the segments: %s", error)
