"""Makes the flow runs on the server agree with the record of their runs, which is the truth.

A flow that dies tells nobody, and one that ends during an outage cannot. So every worker compares, again and again: a
flow run whose run has ended on record gets that state; one whose run nobody executes is scheduled again, so that any
worker of its pool takes it over from its last checkpoint; one that waits to be cancelled and that nobody executes is
cancelled. Two workers may do the same at the same time: the run's lease lets one of them execute it.

In one case the server knows better: a flow that failed before it could take its run, and one that was cancelled while
it waited, have left nothing on record. Their runs get the state of their flow runs.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from pipelines.home import Home
from pipelines.processes.lease import RunBusyError, acquire
from pipelines.remote.sharing import shared_run
from pipelines.running.outbox import SUSPENDED, deliver, schedule_again
from pipelines.server.api import client_settings
from pipelines.server.deployments import EXPERIMENTS, STUDIES
from pipelines.state import Record, RunState
from pipelines.workers.flow_process import FlowProcess, flow_processes, forget, is_noted
from rpg.files import now, read_json
from storage.liveness import LeaseRecord, LeaseWatch, newest_lease

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

_log = logging.getLogger(__name__)
_ROUND_SECONDS = 5.0
_STARTING = timedelta(seconds=60)
"""How long a flow may take from the state that its worker gave it to the run's lease."""
_ENDING_SECONDS = 15.0
"""How long a flow may take from giving up its lease to telling the server how it ended."""
_CRASHES = 3
"""A run whose flow has died so often without a new checkpoint is left alone."""
_CRASHED_LATELY = timedelta(hours=1)
"""How long a crashed flow run may be scheduled again."""
_CLOCKS = timedelta(seconds=10)
"""How far the clocks of the server and of a host may be apart."""
_ENDINGS_SECONDS = 15.0
"""Between two looks at how the flow runs of waiting runs have ended."""
_PAGE = 200
_GONE = "the process that executed it is gone"


class Reconciliation:
    """Compares the flow runs of a pool with the record in a home."""

    def __init__(self, home: Home, pool: str) -> None:
        self._home = home
        self._pool = pool
        self._watch = LeaseWatch()
        self._failed: set[UUID] = set()
        """Flow runs that could not be settled, each of which was logged once."""
        self._waiting: dict[Path, tuple[int, UUID | None]] = {}
        """A run's state.json -> when it was changed, and the flow run on record if the run has not ended there."""
        self._endings_due = 0.0
        """When, by the monotonic clock, the next look at waiting runs is due."""

    def keep_on(self, url: str) -> None:
        """Compares every few seconds from now on, in a thread that ends with the process."""
        threading.Thread(target=self._keep_on, args=(url,), name="reconciliation", daemon=True).start()

    def _keep_on(self, url: str) -> None:
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        # One more try: the server closes a connection that was idle for as long as this thread sleeps.
        quick = {PREFECT_CLIENT_MAX_RETRIES: 1, PREFECT_API_REQUEST_TIMEOUT: 10.0}
        with client_settings(self._home, url), temporary_settings(quick), get_client(sync_client=True) as client:
            message = ""
            while True:
                try:
                    self.compare(client)
                    message = ""
                except Exception as error:  # An outage, mostly; the next round tries again.
                    if message != str(error):
                        message = str(error)
                        _log.warning("flow runs are not compared with the record: %s", message)
                time.sleep(_ROUND_SECONDS)

    def compare(self, client: "SyncPrefectClient") -> None:
        """One round. Raises what the client raises where the server does not answer."""
        processes = {flow.flow_run_id: flow for flow in flow_processes(self._home)}
        dead = [flow for flow in processes.values() if not flow.is_alive]
        for name, settle in ((STUDIES.flow, self._settle_study), (EXPERIMENTS.flow, self._settle_run)):
            for flow_run in self._open_flow_runs(client, name):
                with self._failure_noted(flow_run):
                    settle(client, flow_run, processes.get(str(flow_run.id)))
        for flow in dead:
            if not self._is_open(client, UUID(flow.flow_run_id)):
                forget(self._home, flow)
        if time.monotonic() >= self._endings_due:
            self._record_endings(client)
            self._endings_due = time.monotonic() + _ENDINGS_SECONDS
        deliver(client, self._home)  # Last: a message that makes the server fail must not keep runs from going on.

    @contextlib.contextmanager
    def _failure_noted(self, flow_run: "FlowRun") -> Iterator[None]:
        """A flow run whose parameters or record make no sense must not keep others from being settled."""
        import httpx

        try:
            yield
        except httpx.TransportError:
            raise
        except Exception as error:
            if flow_run.id not in self._failed:
                self._failed.add(flow_run.id)
                _log.warning("flow run %s (%s) is left as it is: %s", flow_run.name, flow_run.id, error)

    def _open_flow_runs(self, client: "SyncPrefectClient", flow: str) -> Iterator["FlowRun"]:
        """Flow runs of the pool, and of no pool, that have not ended; and those that crashed within the last hour."""
        from prefect.client.schemas import filters
        from prefect.client.schemas.objects import StateType

        types = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING, StateType.CRASHED]
        of_type = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=types))
        offset = 0
        while page := client.read_flow_runs(
            flow_filter=filters.FlowFilter(name=filters.FlowFilterName(any_=[flow])),
            flow_run_filter=filters.FlowRunFilter(state=of_type),
            limit=_PAGE,
            offset=offset,
        ):
            for flow_run in page:
                old = _state(flow_run).is_crashed() and _age(_state(flow_run)) > _CRASHED_LATELY
                if flow_run.work_pool_name in (None, self._pool) and not old:
                    yield flow_run
            offset += _PAGE

    def _settle_run(self, client: "SyncPrefectClient", flow_run: "FlowRun", process: FlowProcess | None) -> None:
        run_id = str(flow_run.parameters.get("run_id", ""))
        directory = self._home.run(run_id)
        shared = shared_run(self._home, run_id) if run_id else None
        if shared:
            shared.fetch_standing()
        if not run_id or not (directory / "state.json").exists():
            return  # Of a worker with a home of its own.
        record = RunState(self._home, run_id).record
        own = record["flow_run_id"] == str(flow_run.id)
        state = _state(flow_run)
        if self._watch.is_executed(directory, record):
            if own and (state.is_crashed() or (state.is_pending() and _age(state) > _STARTING)):
                from prefect.states import Running

                self._set(client, flow_run, Running())
            return
        lease = newest_lease(directory)
        if (process and process.is_at_work) or _may_settle_by_itself(state, lease):
            return
        if not shared and self._may_be_elsewhere(client, flow_run, record, lease):
            return
        if state.is_cancelling():
            reason = "cancelled while nobody executed it"
            if own and record["status"] in ("running", "pending"):
                self._end_on_record(run_id, flow_run, "cancelled", reason)
            ending = _ending("cancelled", reason)
        elif record["status"] in ("finished", "failed", "cancelled"):
            ending = _ending(record["status"], record["reason"])
        elif own and record["status"] == "pending" and self._cannot_begin(client, flow_run, lease):
            reason = f"its flow could not begin: {state.message}"
            self._end_on_record(run_id, flow_run, "failed", reason)
            ending = _ending("failed", reason)
        elif own and flow_run.deployment_id and not _crashes_again_and_again(directory, lease):
            self._end_tasks(client, flow_run, {})
            if self._unchanged(client, flow_run):
                schedule_again(client, flow_run.id, _GONE)
            return
        else:
            ending = _ending("crashed", _GONE if own else "another flow run has this run now")
        if ending.type != state.type:
            self._end_tasks(client, flow_run, record["stages"])
            self._set(client, flow_run, ending)

    def _may_be_elsewhere(
        self, client: "SyncPrefectClient", flow_run: "FlowRun", record: Record, lease: LeaseRecord | None
    ) -> bool:
        """Whether a worker with another home may have the flow run: that it was submitted from here says nothing.

        This home's workers have it where one noted its process here, or took or ended the run after the flow run began.
        """
        state = _state(flow_run)
        if state.is_cancelling() and _age(state) < _STARTING:  # Later nobody is there to heed it.
            earlier = [before for before in client.read_flow_run_states(flow_run.id) if not before.is_cancelling()]
            state = max(earlier, key=lambda before: before.timestamp, default=state)
        if not state.is_running() or is_noted(self._home, str(flow_run.id)):
            return False
        if record["reason"] == SUSPENDED:
            return False  # Resumed on the server, it is called running before any worker has it.
        times = [time for time in (record["ended_at"], lease.since if lease else None) if time]
        return all(datetime.fromisoformat(time) + _CLOCKS < state.timestamp for time in times)

    def _cannot_begin(self, client: "SyncPrefectClient", flow_run: "FlowRun", lease: LeaseRecord | None) -> bool:
        """Whether a crashed flow run has crashed again and again since somebody last held its run."""
        if not _state(flow_run).is_crashed():
            return False
        crashed_at = [state.timestamp for state in client.read_flow_run_states(flow_run.id) if state.is_crashed()]
        held_until = datetime.fromisoformat(lease.at) if lease and lease.at else datetime.min.replace(tzinfo=UTC)
        return sum(time > held_until for time in crashed_at) >= _CRASHES

    def _record_endings(self, client: "SyncPrefectClient") -> None:
        """Ends on record the runs that nobody executes and whose flow runs have failed or were cancelled.

        A completed one is left out: who completed it has the results in a home of its own.
        """
        from prefect.client.schemas import filters
        from prefect.client.schemas.objects import StateType

        ended = filters.FlowRunFilterStateType(any_=[StateType.FAILED, StateType.CANCELLED, StateType.CRASHED])
        run_ids = self._waiting_runs()
        flow_run_ids = list(run_ids)
        for start in range(0, len(flow_run_ids), _PAGE):
            of_runs = filters.FlowRunFilter(
                id=filters.FlowRunFilterId(any_=flow_run_ids[start : start + _PAGE]),
                state=filters.FlowRunFilterState(type=ended),
            )
            for flow_run in client.read_flow_runs(flow_run_filter=of_runs, limit=_PAGE):
                with self._failure_noted(flow_run):
                    self._record_ending(run_ids[flow_run.id], flow_run)

    def _waiting_runs(self) -> dict[UUID, str]:
        """The runs that have not ended on record, by their flow runs. An unchanged record is not read again."""
        waiting: dict[Path, tuple[int, UUID | None]] = {}
        for path in self._home.root.glob("runs/*/state.json"):
            with contextlib.suppress(OSError, ValueError):  # removed meanwhile; or written by hand
                changed = path.stat().st_mtime_ns
                known = self._waiting.get(path)
                if known is None or known[0] != changed:
                    record = read_json(path)
                    is_open = record.get("status") in ("pending", "running") and record.get("flow_run_id")
                    known = changed, UUID(record["flow_run_id"]) if is_open else None
                waiting[path] = known
        self._waiting = waiting
        return {flow_run_id: path.parent.name for path, (_, flow_run_id) in waiting.items() if flow_run_id}

    def _record_ending(self, run_id: str, flow_run: "FlowRun") -> None:
        """Ends a run on record as its flow run ended, unless somebody executes it."""
        if shared := shared_run(self._home, run_id):
            shared.fetch_standing()
        record, state = RunState(self._home, run_id).record, _state(flow_run)
        may_go_on = state.is_crashed() and (record["status"] == "running" or _age(state) < _CRASHED_LATELY)
        if may_go_on or self._watch.is_executed(self._home.run(run_id), record):
            return
        if state.is_cancelled():
            self._end_on_record(run_id, flow_run, "cancelled", "cancelled on the server")
        else:
            self._end_on_record(run_id, flow_run, "failed", state.message or f"{state.name} on the server")

    def _settle_study(self, client: "SyncPrefectClient", flow_run: "FlowRun", process: FlowProcess | None) -> None:
        """By the lease that its flow holds. Scheduled again, a study that is done or cancelled ends at once."""
        # Its parameter is "study NAME".
        study = str(flow_run.parameters.get("name", "")).removeprefix("study ")
        directory = self._home.study_flow(study, str(flow_run.id))
        lease, state = newest_lease(directory), _state(flow_run)
        if lease is None and process is None:
            return  # Of a worker with a home of its own.
        if self._watch.is_executed(directory, {}):
            if state.is_crashed() or (state.is_pending() and _age(state) > _STARTING):
                from prefect.states import Running

                self._set(client, flow_run, Running())
            return
        if (process and process.is_at_work) or _may_settle_by_itself(state, lease):
            return
        if state.is_cancelling():
            self._set(client, flow_run, _ending("cancelled", _GONE))
        elif state.is_crashed() and lease is not None and lease.released:
            return  # The flow has ended by itself: its log says why.
        elif self._unchanged(client, flow_run):
            schedule_again(client, flow_run.id, _GONE)

    def _is_open(self, client: "SyncPrefectClient", flow_run_id: UUID) -> bool:
        """Whether a flow run still waits to be settled, by this worker later or by one of its own pool."""
        from prefect.exceptions import ObjectNotFound

        try:
            state = _state(client.read_flow_run(flow_run_id))
        except ObjectNotFound:
            return False
        return state.is_pending() or state.is_running() or state.is_cancelling()

    def _end_on_record(
        self, run_id: str, flow_run: "FlowRun", status: Literal["failed", "cancelled"], reason: str
    ) -> None:
        """Ends the run on record, if this still is its flow run, and nobody executes it or has ended it."""
        with contextlib.suppress(RunBusyError), acquire(self._home.run(run_id), watched=True) as lease:
            state = RunState(self._home, run_id, lease.fence)
            if state.status in ("pending", "running") and state.record["flow_run_id"] == str(flow_run.id):
                state.update(status=status, reason=reason, ended_at=now(), pid=None, pid_started=None)

    def _end_tasks(self, client: "SyncPrefectClient", flow_run: "FlowRun", stages: dict[str, Any]) -> None:
        """Gives the tasks that a dead flow has left the state of their stage on record; without one they crashed."""
        from prefect.client.schemas import filters

        of_flow_run = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[flow_run.id]))
        for task_run in client.read_task_runs(flow_run_filter=of_flow_run):
            if task_run.state is not None and not task_run.state.is_final():
                status = stages.get(task_run.name, {}).get("status", "crashed")
                client.set_task_run_state(task_run.id, _ending(status, _GONE), force=True)

    def _set(self, client: "SyncPrefectClient", flow_run: "FlowRun", state: "State[Any]") -> None:
        if self._unchanged(client, flow_run):
            client.set_flow_run_state(flow_run.id, state, force=True)

    def _unchanged(self, client: "SyncPrefectClient", flow_run: "FlowRun") -> bool:
        """Whether the flow run still has the state by which it was judged."""
        return _state(client.read_flow_run(flow_run.id)).id == _state(flow_run).id


def _ending(status: str, reason: str) -> "State[Any]":
    """A run's or a stage's last status as a state of Prefect's."""
    from prefect.states import Cancelled, Completed, Crashed, Failed

    endings = {"finished": Completed, "failed": Failed, "cancelled": Cancelled}
    # An earlier version kept NUL, which PostgreSQL takes in no text.
    return endings.get(status, Crashed)(message=reason.replace("\0", "") or f"{status} on record")


def _state(flow_run: "FlowRun") -> "State[Any]":
    assert flow_run.state is not None, "the server gives every flow run a state"
    return flow_run.state


def _age(state: "State[Any]") -> timedelta:
    return datetime.now(UTC) - state.timestamp


def _may_settle_by_itself(state: "State[Any]", lease: LeaseRecord | None) -> bool:
    """Whether a flow of another host may have just ended, and is telling so, or just begun, and has no lease yet."""
    if lease is not None and lease.released and lease.seconds_since_beat < _ENDING_SECONDS:
        return True
    if state.is_crashed() or state.is_cancelling():
        return False
    before_lease = lease is None or lease.seconds_since_beat > _age(state).total_seconds()
    return before_lease and _age(state) < _STARTING


def _crashes_again_and_again(run_directory: Path, lease: LeaseRecord | None) -> bool:
    """Whether the last flows of a run have all died without giving it back, and without a checkpoint among them."""
    if lease is None or lease.number < _CRASHES:
        return False
    last = [read_json(path) for path in sorted((run_directory / "leases").glob("*.json"))[-_CRASHES:]]
    checkpoints = (run_directory / "checkpoints").glob("step-*")
    saved_at = max((path.stat().st_mtime for path in checkpoints), default=0.0)
    began_at = datetime.fromisoformat(last[0]["since"]).timestamp() if last[0].get("since") else 0.0
    return not any(fields.get("released") for fields in last) and saved_at < began_at
