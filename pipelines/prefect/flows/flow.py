"""The Prefect flow of a run: its stages in order, each a direct task call in the main thread.

No task is submitted: Prefect cannot interrupt the thread of a submitted task, so that a stage's process would outlive
the flow. `wait_for` draws the edges of the dashboard's graph. Our own fingerprints decide whether a stage is cached;
Prefect only receives the result.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal
from uuid import UUID

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import TagsContext
from prefect.exceptions import Abort, Pause
from prefect.runtime import flow_run as this_flow_run
from prefect.runtime import task_run as this_task_run
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Completed, Failed

from pipelines.home.home import Home
from pipelines.home.state import WAITING, RunState
from pipelines.planning.plan import StagePlan
from pipelines.prefect.flows import dashboard, frozen
from pipelines.prefect.flows.ending import Ending, state_as
from pipelines.prefect.flows.guards import GuardEvents
from pipelines.prefect.server.client import ask_patiently
from pipelines.prefect.server.flow_runs import is_called_off
from pipelines.prefect.server.outbox import SUSPENDED, Outbox
from pipelines.processes.stop import GIVEN_BACK, Stop, give_back_grace
from pipelines.processes.supervisor import StagePausedError, StageStoppedError
from pipelines.running.failures import cause_of_error, may_retry, retry_difference
from pipelines.running.progress import training_line
from pipelines.running.run import RunExecution
from pipelines.running.stages import StageOutcome, perform_stage
from specs.errors import SpecError
from specs.loader import Document
from specs.machine.exit_cause import Cause
from specs.machine.fence import SupersededError
from specs.machine.files import read_json
from specs.machine.lease import RunBusyError
from specs.machine.redacted_log import redact_log_records
from specs.secrets import hide

PAUSED = "Paused"
"""Prefect's name of the state of a stage or run that waits to continue: for Prefect it is completed."""
_INGEST_SECONDS = 30.0
_LAST_INGEST_SECONDS = 60.0
_LOG_SECONDS = 10.0
_PROGRESS_SECONDS = 2.0
_CLOSE_SECONDS = 5.0
"""Longest time in seconds that a flow waits for the server at its end."""
_REQUEST_SECONDS = 20.0
"""Seconds to wait for the server's answer to a call that begins or ends a flow here. The call is tried twice; if both
fail, the run continues, since the record is authoritative."""
DoStage = Callable[[RunExecution, StagePlan, "list[State[Any]]"], "State[Any]"]
"""Function that executes a stage, given the last states of the stages that it reads."""
_handed_over: ContextVar[RunExecution | None] = ContextVar("handed_over", default=None)


def call_flow(execution: RunExecution, name: str) -> None:
    """Calls the flow in this process. The caller keeps the execution, whose state and error then say how it ended.

    If the server is unreachable when the flow begins, the run executes without appearing on the dashboard.

    Args:
        name: the flow run's name on the dashboard.
    """
    token = _handed_over.set(execution)
    try:
        digest = frozen.digest_of(execution.document.to_json())
        patience = {PREFECT_CLIENT_MAX_RETRIES: 1, PREFECT_API_REQUEST_TIMEOUT: _REQUEST_SECONDS}
        with temporary_settings(patience):
            execute_run(name, execution.run_id, digest, execution.until, return_state=True)
    except Abort as abort:  # The server did not receive the run's ending.
        execution.progress.note(f"  {abort}")
    except Exception as error:
        if not execution.begun:
            execution.progress.note(f"  not shown on the dashboard: {error}")
            _hold_and_execute(execution, _do_plainly)
    finally:
        _handed_over.reset(token)


@flow(name="rpg-run", flow_run_name="{name}", validate_parameters=False, persist_result=False)
def execute_run(name: str, run_id: str, document: str, until: int = 0) -> "State[Any]":
    """Executes one run of an experiment. A Prefect worker calls it with these parameters.

    Args:
        name: the flow run's name on the dashboard.
        run_id: id of the run in the experiment.
        document: the digest of the frozen experiment, which the server keeps.
        until: see RunExecution.
    """
    redact_log_records()
    handed_over = _handed_over.get()
    stop = handed_over.stop if handed_over else Stop(gives_back=True, grace=give_back_grace())
    # First of all: Prefect's own handler treats a signal as a crash, and the run would not be given back.
    with _signals_noted(stop):
        if not handed_over and is_called_off_here():
            return Cancelled(message="cancelled before it began")
        execution = handed_over or _prepare(run_id, document, until, stop)
        return _execute(execution, name)


def is_called_off_here() -> bool:
    """Returns whether this flow run was cancelled while its worker was starting this process."""
    flow_run_id = this_flow_run.id
    return flow_run_id is not None and ask_patiently(lambda client: is_called_off(client, UUID(flow_run_id)))


def _prepare(run_id: str, document: str, until: int, stop: Stop) -> RunExecution:
    """Returns the execution for the parameters of `execute_run`."""
    given = Document.from_json(frozen.fetch(document))
    return RunExecution(given, run_id, Home.from_environment(), stop=stop, until=until)


def _execute(execution: RunExecution, name: str) -> "State[Any]":
    """Executes the run, and reports its end to the server. Returns the flow's last state. Raises Abort if the server's
    state must not change."""
    execution.outbox = outbox = Outbox(execution.home, this_flow_run.id)
    outbox.start()
    outbox.log(f"{execution.run_id}: {name}")
    try:
        ending = _hold_and_execute(execution, _do_as_task)
        _show(execution, dashboard.publish_experiment)
    except BaseException:
        outbox.close(_CLOSE_SECONDS)
        raise
    if not outbox.close(_CLOSE_SECONDS, schedule=_is_given_back(execution)):
        raise Abort("the Prefect server does not answer; its pending updates are kept")
    if ending is None:
        raise Abort(str(execution.error))
    return ending


def _signals_noted(stop: Stop) -> contextlib.AbstractContextManager[None]:
    if threading.current_thread() is threading.main_thread():
        return stop.on_signals()
    return contextlib.nullcontext()


def _hold_and_execute(execution: RunExecution, do: DoStage) -> "State[Any] | None":
    """Executes the run, which only one process may do at a time.

    Returns the flow's last state; None if the server's state has to stay, because the run continues later, or another
    process executes this same flow run.
    """
    try:
        with execution.held():
            return _execute_and_record(execution, do)
    except RunBusyError as busy:
        execution.error = busy
        # Read again: another process may have begun the run since this execution was planned.
        holder = RunState(execution.home, execution.run_id).record["flow_run_id"]
        same_flow_run = holder == execution.outbox.flow_run_id
        return None if same_flow_run else Failed(name="Busy", message=str(busy))
    except SupersededError as superseded:
        execution.error = superseded
        by_worker = _handed_over.get() is None
        return None if by_worker else Cancelled(name="Superseded", message=str(superseded))


def _execute_and_record(execution: RunExecution, do: DoStage) -> "State[Any] | None":
    """Returns the flow's last state; None if the run continues later."""
    execution.begin(execution.outbox.flow_run_id)
    with execution.sinks.sending(execution.warn):
        return _execute_begun(execution, do)


def _execute_begun(execution: RunExecution, do: DoStage) -> "State[Any] | None":
    try:
        dashboard.publish_plan(execution)
        early = _run_stages(execution, do)
    except Pause:  # Prefect's own, between two tasks of a flow run that was suspended on the server.
        execution.state.end("pending", SUSPENDED)
        raise
    except BaseException as error:
        status = "cancelled" if isinstance(error, KeyboardInterrupt) else "failed"
        if isinstance(error, Exception):
            # A stage's own failure, which the server did not receive, is more precise.
            execution.error = error = execution.error or error
        execution.state.end(status, f"{type(error).__name__}: {error}", cause=_cause(execution, error))
        raise
    if early is None:
        execution.state.end("finished", "")
        return Completed(message=f"{execution.run_id}: all stages done")
    if early.name == PAUSED:
        execution.state.end("cancelled", early.message or "")
        return Completed(name=PAUSED, message=early.message)
    if isinstance(execution.error, StageStoppedError) and execution.error.request.status == "pending":
        execution.state.end("pending", WAITING if _is_given_back(execution) else execution.error.request.reason)
        return None
    ending = Ending("cancelled" if early.is_cancelled() else "failed", early.message or "")
    execution.state.end(*ending, cause=_cause(execution, execution.error))
    return state_as(*ending)


def _cause(execution: RunExecution, error: BaseException | None) -> Cause:
    """Returns the cause of the run's failure. If the disk is full, that is the cause, even if the first error names
    another one, such as the server."""
    cause = cause_of_error(error)
    return "disk_full" if cause == "other" and execution.home.is_full() else cause


def _is_given_back(execution: RunExecution) -> bool:
    """Returns whether the run ended so that another worker continues it."""
    return isinstance(execution.error, StageStoppedError) and execution.error.request.reason == GIVEN_BACK


def _run_stages(execution: RunExecution, do: DoStage) -> "State[Any] | None":
    """Executes each stage. Returns the state of the stage that ended the run early, if one did."""
    states: dict[str, State[Any]] = {}
    for stage in execution.plan.stages:
        state = do(execution, stage, [states[name] for name in stage.inputs])
        states[stage.stage] = state
        if not state.is_completed() or state.name == PAUSED:
            return state
    return None


def _do_as_task(execution: RunExecution, stage: StagePlan, upstream: "list[State[Any]]") -> "State[Any]":
    """Calls the stage's task, which Prefect calls again if another attempt may succeed."""
    policy = getattr(execution.plan.experiment.stages, stage.stage)
    task_of_stage = run_stage.with_options(
        name=stage.stage,
        task_run_name=stage.stage,
        retries=policy.retries,
        retry_condition_fn=_retry_condition(execution, stage.stage),
    )
    # Prefect requests a slot for each tag of a task: 1.6 s a stage. The flow run has the run's tags.
    with TagsContext(current_tags=set()):
        state: State[Any] = task_of_stage(execution, stage, wait_for=upstream, return_state=True)
    return state


def _do_plainly(execution: RunExecution, stage: StagePlan, _upstream: "list[State[Any]]") -> "State[Any]":
    """Executes the stage without Prefect's engine, which needs a server to begin a flow. Retries as often as the engine
    would."""
    may_try_again = _retry_condition(execution, stage.stage)
    state = run_stage.fn(execution, stage)
    for _ in range(getattr(execution.plan.experiment.stages, stage.stage).retries):
        if not state.is_failed() or not may_try_again(None, None, None):
            break
        _wait_before_retry(execution, stage)
        state = run_stage.fn(execution, stage)
    return state


@task(name="stage", persist_result=False, cache_policy=NO_CACHE)
def run_stage(execution: RunExecution, stage: StagePlan) -> "State[Any]":
    """Executes one stage. Prefect sees Completed, Cached, Paused, Cancelled or Failed."""
    if (this_task_run.run_count or 0) > 1:
        _wait_before_retry(execution, stage)
    reporter = _StageReporter(execution, stage)
    try:
        with reporter.guards_told():
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
        reporter.give_up()
        execution.outbox.log(f"{stage.stage} failed: {error_text(error)}", level=logging.ERROR)
        return Failed(message=error_text(error), data=error)
    execution.error = None
    reporter.close(outcome)
    if outcome == "cached":
        return Completed(name="Cached", message=stage.reason)
    execution.outbox.log(f"{stage.stage} done")
    return Completed(message=stage.reason)


def _retry_condition(execution: RunExecution, stage: str) -> Callable[[Any, Any, Any], bool]:
    """Returns Prefect's retry condition: false after a user's mistake, a stop, or an error that would only recur.

    The condition has to be a plain function: Prefect 3 treats any other callable, such as a partial, as false.
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
    execution.progress.note(f"  retrying in {policy.retry_delay_seconds:g} s{differently}: {cause}")
    while time.monotonic() < deadline and not execution.stop_requested():
        time.sleep(0.1)


def error_text(error: Exception) -> str:
    """Returns an error's text for the record: a user's mistake as the user sees it, or another error's message.

    The text has no NUL, which a process may print and PostgreSQL accepts in no text.
    """
    if isinstance(error, SpecError):
        from specs.errors import render

        return hide(render(error.issues, done=error.done)).replace("\0", "")
    return hide(str(error)).replace("\0", "") or type(error).__name__


class _StageReporter:
    """Reporter of a running stage: ingests its rows and shows its progress on the dashboard at intervals."""

    def __init__(self, execution: RunExecution, stage: StagePlan) -> None:
        self._execution = execution
        self._guards = GuardEvents(execution) if stage.stage == "train" else None
        self._stage = stage.stage
        self._shown_at = self._logged_at = self._ingested_at = time.monotonic()
        self._last_step = -1

    def tick(self) -> None:
        """Ingests rows and shows progress if the interval has passed. Called many times a second."""
        now = time.monotonic()
        if now - self._shown_at < _PROGRESS_SECONDS:
            return
        self._shown_at = now
        _show(self._execution, dashboard.publish_begin)
        self._execution.sinks.look()
        if self._stage == "train":
            self._tick_training(now)
        elif self._stage == "evaluate" and now - self._ingested_at >= _INGEST_SECONDS:
            self._ingest()
            self._ingested_at = time.monotonic()

    def _tick_training(self, now: float) -> None:
        progress = read_json(self._execution.directory / "progress.json")
        if progress.get("steps"):
            dashboard.publish_progress(self._execution, 100.0 * progress["step"] / progress["steps"])
        step = progress.get("step", -1)
        if step != self._last_step and now - self._logged_at >= _LOG_SECONDS:
            self._logged_at, self._last_step = now, step
            self._execution.outbox.log(training_line(progress), key="training line")
        if now - self._ingested_at >= _INGEST_SECONDS:
            self._ingest()
            _show(self._execution, dashboard.publish_learning_curve)
            self._tell_guards()
            self._ingested_at = time.monotonic()

    @contextlib.contextmanager
    def guards_told(self) -> Iterator[None]:
        """Reports each guard that acted to the server at the end of the block, also after an error."""
        try:
            yield
        finally:
            self._tell_guards()

    def close(self, outcome: StageOutcome | Literal["paused"]) -> None:
        """Shows the stage's rows on the dashboard. The report stage ingests them into the database. If training pauses,
        no report follows, and the rows are ingested here."""
        if self._stage == "train":
            if outcome == "paused":
                self._ingest(whole=True)
            if outcome == "done":
                dashboard.publish_progress(self._execution, 100.0)
            _show(self._execution, dashboard.publish_learning_curve)
        elif self._stage == "evaluate":
            _show(self._execution, dashboard.publish_results)

    def give_up(self) -> None:
        """Ingests the remaining rows of training if no report follows."""
        if self._stage == "evaluate":
            self._ingest(whole=True)

    def _tell_guards(self) -> None:
        if self._guards is not None:
            _show(self._execution, self._guards.tell)

    def _ingest(self, *, whole: bool = False) -> None:
        """Ingests the run's rows unless another process is ingesting. Queries read rows that are not ingested from the
        segments.

        Args:
            whole: the run's trainer has ended.
        """
        import duckdb
        from filelock import Timeout

        from storage.ingest import ingest

        try:
            # The trainer's last segments are merged now, or perhaps much later: wait for another ingester, which takes
            # seconds.
            wait_seconds = _LAST_INGEST_SECONDS if whole else 0.0
            ingest(self._execution.home.root, wait_seconds=wait_seconds, compact=self._execution.run_id, whole=whole)
        except (Timeout, OSError, duckdb.Error) as error:
            self._warn(f"the database lacks the newest rows, which stay in the segments: {error}")

    def _warn(self, text: str) -> None:
        self._execution.outbox.log(text, level=logging.WARNING, key="warning")


def _show(execution: RunExecution, publish: Callable[[RunExecution], None]) -> None:
    """Shows something on the dashboard. The run does not depend on it: any error is only logged."""
    try:
        publish(execution)
    except Exception as error:
        execution.outbox.log(f"not shown on the dashboard: {error}", level=logging.WARNING, key="warning")
