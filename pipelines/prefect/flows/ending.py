"""The end of a run without a live process: written to the server and to the record, for every command that requests
it."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.home.home import Home
from pipelines.home.state import RunState
from pipelines.launchers import concurrent_directory, launchers
from pipelines.prefect.server.flow_runs import set_state, state_of
from pipelines.processes.reap import end_left_process
from pipelines.processes.stop import clear_request
from specs.machine.lease import acquire

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

GONE = "the process that executed it is gone"


class Ending(NamedTuple):
    """The recorded ending of a run."""

    status: str
    reason: str


class FlowRuns(NamedTuple):
    """Flow runs of one server, as they were when they were read."""

    client: "SyncPrefectClient"
    found: "Sequence[FlowRun]"


def end_run(
    home: Home, run_id: str, ending: Ending, *servers: FlowRuns, of: str = "", watched: bool = False
) -> Ending | None:
    """Ends a run without a live process, on servers and on record. If the run has already ended on record, the record
    keeps that ending and the servers receive it; only a waiting flow run gets the new ending.

    The servers come first, while this process holds the run: a refused ending is not recorded either, and no worker
    that has received the run can begin it. If the disk is full, the next comparison of flow runs with the record writes
    the ending.

    Args:
        ending: the ending if the run has not ended yet.
        servers: the run's flow runs that get its ending.
        of: the flow run that the run must still have; empty means any.
        watched: as for `acquire`.
    Returns:
        The ending that holds; None if another flow run has the run.
    Raises:
        RunBusyError: another process executes the run.
        DiskError: the disk is full or not writable.
    """
    state = RunState(home, run_id)
    if state.is_over:
        return _tell(servers, state)
    with acquire(home.run(run_id), watched=watched, settles=True) as lease:
        state = RunState(home, run_id, lease.fence)
        if of and state.record["flow_run_id"] != of:
            return None
        if state.is_over:
            return _tell(servers, state)
        if state.status == "running":
            end_work(home, run_id)
        _tell(servers, state, ending)
        clear_request(home.run(run_id))
        state.end(*ending)
    return ending


def end_work(home: Home, run_id: str) -> None:
    """Ends the processes and jobs that the run's flow started, on this machine and elsewhere."""
    end_left_process(home.run(run_id))
    # Every launcher is asked: the run may have been started by another launcher than its spec names now.
    for launcher in launchers():
        for directory in (home.run(run_id), concurrent_directory(home.run(run_id))):
            launcher.end(directory)


def _tell(servers: Iterable[FlowRuns], state: RunState, ending: Ending | None = None) -> Ending:
    """Gives flow runs the ending of a run, and their tasks the endings of its stages. `ending`: None means the recorded
    one."""
    told = ending or Ending(state.status, state.record["reason"])
    for client, found in servers:
        for flow_run in found:
            end_flow_run(client, flow_run, told, state.record["stages"])
    return told


def end_flow_run(
    client: "SyncPrefectClient", flow_run: "FlowRun", ending: Ending, stages: dict[str, Any] | None = None
) -> None:
    """Gives a flow run without a live process its last state, and its open tasks the states of their stages.

    Nothing changes if the flow run has that state, or if its state has changed since it was read.
    """
    state = state_as(*ending)
    if state.type != state_of(flow_run).type:
        end_tasks(client, flow_run, stages or {})
        set_state(client, flow_run, state)


def ending_of(flow_run: "FlowRun") -> Ending:
    """Returns the ending of a flow run that the run's record lacks: the flow run failed before it began the run, or was
    cancelled."""
    state = state_of(flow_run)
    if state.is_cancelled():
        return Ending("cancelled", "cancelled on the server")
    return Ending("failed", state.message or f"{state.name} on the server")


def end_tasks(client: "SyncPrefectClient", flow_run: "FlowRun", stages: dict[str, Any]) -> None:
    """Gives the open tasks of a dead flow the recorded states of their stages. A task whose stage has no record becomes
    crashed."""
    from prefect.client.schemas import filters

    of_flow_run = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[flow_run.id]))
    for task_run in client.read_task_runs(flow_run_filter=of_flow_run):
        if task_run.state is not None and not task_run.state.is_final():
            status = stages.get(task_run.name, {}).get("status", "crashed")
            client.set_task_run_state(task_run.id, state_as(status, GONE), force=True)


def state_as(status: str, reason: str) -> "State[Any]":
    """Returns a run's or a stage's last status as a Prefect state."""
    from prefect.states import Cancelled, Completed, Crashed, Failed

    endings = {"finished": Completed, "failed": Failed, "cancelled": Cancelled}
    return endings.get(status, Crashed)(message=reason or f"{status} on record")
