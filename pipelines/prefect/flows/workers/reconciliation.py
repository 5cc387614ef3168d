"""Reconciles the flow runs on the server with the record of their runs, which is authoritative.

A flow that dies sends the server nothing, and one that ends during an outage cannot. So every worker compares
repeatedly. A flow run gets the state of its run if the run has ended on record. It is scheduled again if its run has no
live process, so that any worker of its pool resumes it from its last checkpoint. It is cancelled if it waits to be
cancelled and has no live process. Two workers may do the same at the same time: the run's lease lets one of them
execute it.

In two cases the server is authoritative: a flow that failed before it could take its run, and one that was cancelled
while it waited, have left nothing on record. Their runs get the state of their flow runs.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pipelines.home.home import Home
from pipelines.home.state import SUBMITTED, WAITING, Record, RunState
from pipelines.prefect.flows.ending import (
    GONE,
    Ending,
    FlowRuns,
    end_flow_run,
    end_run,
    end_tasks,
    ending_of,
)
from pipelines.prefect.flows.workers.flow_process import FlowProcess, flow_processes, forget, is_noted
from pipelines.prefect.server.api import client_settings
from pipelines.prefect.server.deployments import EXPERIMENTS, SCHEDULES, STUDIES
from pipelines.prefect.server.flow_runs import is_unchanged, run_id_of, set_state, state_of, study_of
from pipelines.prefect.server.outbox import SUSPENDED, deliver, schedule_again
from pipelines.remote.sharing import shared_run
from specs.machine.files import read_json
from specs.machine.lease import RunBusyError, acquire
from specs.machine.liveness import FINAL, LeaseRecord, LeaseWatch, newest_lease

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

_log = logging.getLogger(__name__)
_ROUND_SECONDS = 5.0
_STARTING = timedelta(seconds=60)
"""Longest time between a worker setting a flow run's state and the flow holding the run's lease."""
_ENDING_SECONDS = 15.0
"""Longest time in seconds between a flow releasing its lease and reporting its end to the server."""
_CRASHES = 3
"""Number of crashes of a run's flow, without a new checkpoint, after which the run is not scheduled again."""
_CRASHED_LATELY = timedelta(hours=1)
"""Time after a crash during which a flow run may be scheduled again."""
_CLOCKS = timedelta(seconds=10)
"""Largest difference between the clocks of the server and of a host."""
_ENDINGS_SECONDS = 15.0
"""Seconds between two reads of how the flow runs of waiting runs have ended."""
_PAGE = 200


class Reconciliation:
    """Comparison of a pool's flow runs with the record in a home."""

    def __init__(self, home: Home, pool: str) -> None:
        self._home = home
        self._pool = pool
        self._watch = LeaseWatch()
        self._failed: set[str] = set()
        """Flow runs that could not be settled, each of which was logged once."""
        self._waiting: dict[Path, tuple[int, UUID | None]] = {}
        """A run's state.json -> its modification time, and the recorded flow run if the run has not ended on record."""
        self._endings_due = 0.0
        """Monotonic time of the next read of waiting runs."""

    def keep_on(self, url: str) -> None:
        """Starts a thread that compares every few seconds and ends with the process."""
        threading.Thread(target=self._keep_on, args=(url,), name="reconciliation", daemon=True).start()

    def _keep_on(self, url: str) -> None:
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        # One more try: the server closes a connection that is idle while this thread sleeps.
        quick = {PREFECT_CLIENT_MAX_RETRIES: 1, PREFECT_API_REQUEST_TIMEOUT: 10.0}
        with client_settings(self._home, url), temporary_settings(quick), get_client(sync_client=True) as client:
            message = ""
            while True:
                try:
                    self.compare(client)
                    message = ""
                except Exception as error:  # Mostly an outage; the next round retries.
                    if message != str(error):
                        message = str(error)
                        _log.warning("flow runs are not compared with the record: %s", message)
                time.sleep(_ROUND_SECONDS)

    def compare(self, client: "SyncPrefectClient") -> None:
        """Executes one round. Raises the client's exception if the server does not answer."""
        processes = {flow.flow_run_id: flow for flow in flow_processes(self._home)}
        dead = [flow for flow in processes.values() if not flow.is_alive]
        for flow in processes.values():
            if flow.is_alive and not flow.is_at_work:
                with self._failure_noted(f"flow run {flow.flow_run_id}", flow.flow_run_id):
                    self._end_stopped(client, flow)
        flows = {STUDIES: self._settle_study, EXPERIMENTS: self._settle_run, SCHEDULES: self._settle_submission}
        for deployment, settle in flows.items():
            for flow_run in self._open_flow_runs(client, deployment.flow):
                with self._failure_noted(_named(flow_run), str(flow_run.id)):
                    settle(client, flow_run, processes.get(str(flow_run.id)))
        for flow in dead:
            with self._failure_noted(f"flow run {flow.flow_run_id}", flow.flow_run_id):
                if not self._is_open(client, UUID(flow.flow_run_id)):
                    forget(self._home, flow)
        if time.monotonic() >= self._endings_due:
            self._record_endings(client)
            self._endings_due = time.monotonic() + _ENDINGS_SECONDS
        deliver(client, self._home)  # Last: a message that makes the server fail must not keep runs from resuming.

    def _end_stopped(self, client: "SyncPrefectClient", flow: FlowProcess) -> None:
        """Kills a flow that was stopped (SIGSTOP) and has lost its run, or never began it, so that its worker can take
        another run."""
        from prefect.exceptions import ObjectNotFound

        with contextlib.suppress(ObjectNotFound):
            flow_run = client.read_flow_run(UUID(flow.flow_run_id))
            study, run_id = study_of(flow_run), run_id_of(flow_run)
            directory = self._home.run(run_id) if run_id else self._home.study_flow(study, flow.flow_run_id)
            lease = newest_lease(directory)
            is_own = lease is not None and lease.pid == flow.process.pid
            if is_own and self._watch.is_executed(directory, {}):
                return
            if is_own or _age(state_of(flow_run)) > _STARTING:
                flow.kill()

    @contextlib.contextmanager
    def _failure_noted(self, name: str, flow_run_id: str) -> Iterator[None]:
        """Logs the error of a flow run with invalid parameters, record or note. The other flow runs are still
        settled."""
        import httpx

        try:
            yield
        except httpx.TransportError:
            raise
        except Exception as error:
            if flow_run_id not in self._failed:
                self._failed.add(flow_run_id)
                _log.warning("%s is left as it is: %s", name, error)

    def _open_flow_runs(self, client: "SyncPrefectClient", flow: str) -> Iterator["FlowRun"]:
        """Yields the flow runs of the pool, and those without a pool, that have not ended or that crashed within the
        last hour."""
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
                old = state_of(flow_run).is_crashed() and _age(state_of(flow_run)) > _CRASHED_LATELY
                if flow_run.work_pool_name in (None, self._pool) and not old:
                    yield flow_run
            offset += _PAGE

    def _settle_run(self, client: "SyncPrefectClient", flow_run: "FlowRun", process: FlowProcess | None) -> None:
        run_id = run_id_of(flow_run)
        directory = self._home.run(run_id)
        shared = shared_run(self._home, run_id) if run_id else None
        if shared:
            shared.fetch_standing()
        if not run_id or not (directory / "state.json").exists():
            return  # A worker with a home of its own has it.
        standing = RunState(self._home, run_id)
        record = standing.record
        own = record["flow_run_id"] == str(flow_run.id)
        state = state_of(flow_run)
        if self._watch.is_executed(directory, record):
            if own and (state.is_crashed() or (state.is_pending() and _age(state) > _STARTING)):
                from prefect.states import Running

                set_state(client, flow_run, Running())
            return
        lease = newest_lease(directory, settling=False)
        if (process and process.is_at_work) or _may_settle_by_itself(state, lease):
            return
        if not shared and self._may_be_elsewhere(client, flow_run, record, lease):
            return
        ending = self._ending(client, flow_run, standing, lease)
        if ending is None:
            self._schedule_again(client, flow_run, shared is not None)
        elif standing.is_over or (own and ending.status in FINAL):
            with contextlib.suppress(RunBusyError):
                of = str(flow_run.id)  # The run may have been submitted again since its record was read.
                end_run(self._home, run_id, ending, FlowRuns(client, [flow_run]), of=of, watched=True)
        else:
            end_flow_run(client, flow_run, ending, record["stages"])

    def _ending(
        self, client: "SyncPrefectClient", flow_run: "FlowRun", standing: RunState, lease: LeaseRecord | None
    ) -> Ending | None:
        """Returns how a flow run without a live process ends; None if a worker of its pool should resume it."""
        state = state_of(flow_run)
        own = standing.record["flow_run_id"] == str(flow_run.id)
        directory = self._home.run(run_id_of(flow_run))
        if state.is_cancelling():
            return Ending("cancelled", "cancelled while no process executed it")
        if own and standing.waits and self._cannot_begin(client, flow_run, lease):
            return Ending("failed", f"its flow could not begin: {state.message}")
        if own and not standing.is_over and flow_run.deployment_id:
            return Ending("crashed", GONE) if _crashes_again_and_again(directory) else None
        return Ending("crashed", GONE if own else "another flow run executes this run now")

    def _schedule_again(self, client: "SyncPrefectClient", flow_run: "FlowRun", is_shared: bool) -> None:
        """Gives a run without a live process back to the queue, on record and on the server.

        Args:
            is_shared: the run is in an object store; the worker that takes it over writes its state.
        """
        if is_shared:
            end_tasks(client, flow_run, {})
            schedule_again(client, flow_run, GONE)
            return
        run_id = run_id_of(flow_run)
        with contextlib.suppress(RunBusyError), acquire(self._home.run(run_id), watched=True, settles=True) as lease:
            # Read again: it may have been cancelled or submitted again before this process held it.
            state = RunState(self._home, run_id, lease.fence)
            if state.is_over or state.record["flow_run_id"] != str(flow_run.id):
                return
            end_tasks(client, flow_run, {})
            if is_unchanged(client, flow_run):
                if state.status == "running":
                    state.end("pending", WAITING)
                schedule_again(client, flow_run, GONE)

    def _may_be_elsewhere(
        self, client: "SyncPrefectClient", flow_run: "FlowRun", record: Record, lease: LeaseRecord | None
    ) -> bool:
        """Returns whether a worker of another home may be executing the flow run, even if this home submitted it.

        A worker of this home has it if that worker noted its process here, or took or ended the run after the flow run
        began.
        """
        state = state_of(flow_run)
        if state.is_cancelling() and _age(state) < _STARTING:  # Later no process is left to react to it.
            earlier = [before for before in client.read_flow_run_states(flow_run.id) if not before.is_cancelling()]
            state = max(earlier, key=lambda before: before.timestamp, default=state)
        if not state.is_running() or is_noted(self._home, str(flow_run.id)):
            return False
        if record["reason"] == SUSPENDED:
            return False  # A flow run resumed on the server is shown as running before any worker has it.
        times = [time for time in (record["ended_at"], lease.since if lease else None) if time]
        return all(datetime.fromisoformat(time) + _CLOCKS < state.timestamp for time in times)

    def _cannot_begin(self, client: "SyncPrefectClient", flow_run: "FlowRun", lease: LeaseRecord | None) -> bool:
        """Returns whether a crashed flow run has crashed repeatedly since a process last held its run."""
        if not state_of(flow_run).is_crashed():
            return False
        crashed_at = [state.timestamp for state in client.read_flow_run_states(flow_run.id) if state.is_crashed()]
        held_until = datetime.fromisoformat(lease.at) if lease and lease.at else datetime.min.replace(tzinfo=UTC)
        return sum(time > held_until for time in crashed_at) >= _CRASHES

    def _record_endings(self, client: "SyncPrefectClient") -> None:
        """Ends on record the runs that have no live process and whose flow runs have failed or were cancelled.

        A completed one is left out: the worker that completed it has the results in a home of its own.
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
                with self._failure_noted(_named(flow_run), str(flow_run.id)):
                    self._record_ending(run_ids[flow_run.id], flow_run)

    def _waiting_runs(self) -> dict[UUID, str]:
        """Returns the runs that have not ended on record, by their flow runs. An unchanged record is not read again."""
        waiting: dict[Path, tuple[int, UUID | None]] = {}
        for path in self._home.root.glob("runs/*/state.json"):
            with contextlib.suppress(OSError, ValueError):  # removed meanwhile; or written by hand
                changed = path.stat().st_mtime_ns
                known = self._waiting.get(path)
                if known is None or known[0] != changed:
                    record = read_json(path)
                    is_open = record.get("reason") == SUBMITTED or record.get("status") in ("pending", "running")
                    is_open = is_open and record.get("flow_run_id")
                    known = changed, UUID(record["flow_run_id"]) if is_open else None
                waiting[path] = known
        self._waiting = waiting
        return {flow_run_id: path.parent.name for path, (_, flow_run_id) in waiting.items() if flow_run_id}

    def _record_ending(self, run_id: str, flow_run: "FlowRun") -> None:
        """Ends a run on record with its flow run's ending, unless a process executes it."""
        if shared := shared_run(self._home, run_id):
            shared.fetch_standing()
        record, state = RunState(self._home, run_id).record, state_of(flow_run)
        may_go_on = state.is_crashed() and (record["status"] == "running" or _age(state) < _CRASHED_LATELY)
        if may_go_on or self._watch.is_executed(self._home.run(run_id), record):
            return
        with contextlib.suppress(RunBusyError):
            end_run(self._home, run_id, ending_of(flow_run), of=str(flow_run.id), watched=True)

    def _settle_study(self, client: "SyncPrefectClient", flow_run: "FlowRun", process: FlowProcess | None) -> None:
        """Settles a study by the lease that its flow holds. If a study that is done or cancelled is scheduled again, it
        ends at once."""
        directory = self._home.study_flow(study_of(flow_run), str(flow_run.id))
        lease, state = newest_lease(directory), state_of(flow_run)
        if lease is None and process is None:
            # A pending one was claimed by a worker, of any home, that has not begun it.
            nothing_recorded = {"reason": "", "ended_at": None}
            if state.is_crashed() or self._may_be_elsewhere(client, flow_run, nothing_recorded, lease):
                return
        if self._watch.is_executed(directory, {}):
            if state.is_crashed() or (state.is_pending() and _age(state) > _STARTING):
                from prefect.states import Running

                set_state(client, flow_run, Running())
            return
        if (process and process.is_at_work) or _may_settle_by_itself(state, lease):
            return
        if state.is_cancelling():
            end_flow_run(client, flow_run, Ending("cancelled", GONE))
        elif state.is_crashed() and lease is not None and lease.released:
            return  # The flow has ended by itself: its log says why.
        elif self._cannot_begin(client, flow_run, lease):
            end_flow_run(client, flow_run, Ending("failed", f"its flow could not begin: {state.message}"))
        else:
            schedule_again(client, flow_run, GONE)

    def _settle_submission(self, client: "SyncPrefectClient", flow_run: "FlowRun", process: FlowProcess | None) -> None:
        """Schedules a cron submission again if a worker has claimed but not begun it, or if its process is gone."""
        state = state_of(flow_run)
        is_lost = state.is_pending() or (state.is_running() and process is not None)
        if is_lost and not (process and process.is_alive) and _age(state) > _STARTING:
            schedule_again(client, flow_run, GONE)

    def _is_open(self, client: "SyncPrefectClient", flow_run_id: UUID) -> bool:
        """Returns whether a flow run still has to be settled, later by this worker or by a worker of its own pool."""
        from prefect.exceptions import ObjectNotFound

        try:
            state = state_of(client.read_flow_run(flow_run_id))
        except ObjectNotFound:
            return False
        return state.is_pending() or state.is_running() or state.is_cancelling()


def _named(flow_run: "FlowRun") -> str:
    return f"flow run {flow_run.name} ({flow_run.id})"


def _age(state: "State[Any]") -> timedelta:
    return datetime.now(UTC) - state.timestamp


def _may_settle_by_itself(state: "State[Any]", lease: LeaseRecord | None) -> bool:
    """Returns whether a flow on another host may have just ended and not reported it yet, or just begun and have no
    lease yet."""
    if lease is not None and lease.released and lease.seconds_since_beat < _ENDING_SECONDS:
        return True
    if state.is_crashed() or state.is_cancelling():
        return False
    before_lease = lease is None or lease.seconds_since_beat > _age(state).total_seconds()
    return before_lease and _age(state) < _STARTING


def _crashes_again_and_again(run_directory: Path) -> bool:
    """Returns whether the last flows of a run have all died without giving the run back, with no new checkpoint between
    them."""
    leases = map(read_json, sorted((run_directory / "leases").glob("*.json")))
    last = [fields for fields in leases if fields and not fields.get("settles")][-_CRASHES:]
    checkpoints = (run_directory / "checkpoints").glob("step-*")
    saved_at = max((path.stat().st_mtime for path in checkpoints), default=0.0)
    began_at = datetime.fromisoformat(last[0]["since"]).timestamp() if last and last[0].get("since") else 0.0
    return len(last) == _CRASHES and not any(fields.get("released") for fields in last) and saved_at < began_at
