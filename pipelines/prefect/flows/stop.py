"""Stops runs that have flow runs on a Prefect server, and updates their record in this home."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from pipelines.home.home import Home
from pipelines.home.state import RunState
from pipelines.prefect.flows.ending import Ending, FlowRuns, end_flow_run, end_run, ending_of
from pipelines.prefect.flows.submit import flow_run_link
from pipelines.prefect.server.api import is_healthy, running_services
from pipelines.prefect.server.client import prefect_client
from pipelines.prefect.server.flow_runs import LIVE, OPEN, flow_runs, has_begun, run_id_of, state_of, study_of
from pipelines.processes.stop import cancel_message
from specs.errors import Issue, SpecError
from specs.machine.files import read_json

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

CLOSING_SECONDS = 15.0
"""Longest time in seconds that a flow takes, after its stage has ended, to record that it was cancelled."""
_NOTICE_SECONDS = 30.0
"""Longest time in seconds that a worker takes to notice that one of its flow runs is to be cancelled."""
_TELLING_SECONDS = 8.0
"""Longest time in seconds that a flow takes, once its run has ended on record, to report that to the server."""
_LOOK_SECONDS = 0.5
_ROUNDS = 5
"""Number of attempts to end flow runs whose state the server may change at the same time, for example from scheduled to
late."""
_EXECUTED = ("PENDING", "RUNNING", "CANCELLING")
"""State types of flow runs that a worker executes, or is about to execute."""
_STATUS = {"COMPLETED": "finished", "SCHEDULED": "pending"}
"""State type of a flow run -> the run's status in messages. Any other type keeps its own name."""


class NotStoppedError(Exception):
    """Error for a run that was asked to stop and has not stopped yet."""


class EndedError(SpecError):
    """Error for a run that is not running and no longer waits anywhere. The issue gives its state."""


def waiting_on_servers(home: Home, experiment: str, states: Mapping[str, RunState], silent: set[str]) -> list[str]:
    """Returns the runs of an experiment that have ended on record but have open flow runs on a server.

    Args:
        silent: see `end_everywhere`.
    """
    ended = {run_id: state.record.get("api_url") for run_id, state in states.items() if state.is_over}
    waiting: set[str] = set()
    for url in filter(None, dict.fromkeys(ended.values())):
        if _answers(url, silent):
            with prefect_client(home, url) as client:
                waiting |= {run_id_of(found) for found in flow_runs(client, LIVE, experiment=experiment)}
    return [run_id for run_id in ended if run_id in waiting]


def end_everywhere(home: Home, run_id: str, grace: float, *, was_executed: bool, silent: set[str]) -> str:
    """Ends a run that has no live process here, on record and on each server that has flow runs of it.

    Args:
        grace: seconds after which a worker with another home kills processes that still run.
        was_executed: a process here was asked to stop, and has stopped.
        silent: servers that have not answered this command, which waits for each of them once. Updated here.
    Returns:
        A sentence that says how it ended.
    Raises:
        RunBusyError: a process here has just taken the run.
        EndedError: there was nothing to stop.
        SpecError: the server that the run waits on does not answer.
        NotStoppedError: a worker with another home was asked to stop and has not stopped yet.
    """
    state = RunState(home, run_id)
    with _servers(home, state, silent) as servers:
        if state.is_over:
            return _end_what_waits(home, state, servers, was_executed=was_executed)
        own = _own(state, servers)
        if state.waits:
            return _end_waiting(home, state, own, servers, grace)
        if state.status == "pending":
            raise EndedError(Issue("the run is not running but pending", given=run_id))
        failed = own is not None and _kind(own) == "FAILED"
        ending = ending_of(own) if own and failed else Ending("cancelled", "cancelled after a crash")
        held = _end_for_good(home, run_id, ending, servers)
    if held != ending:  # Another process ended it meanwhile.
        return words(run_id, held.status)
    return f"{run_id} had crashed; it is marked {ending.status}"


def stop_flow_runs(home: Home, client: "SyncPrefectClient", found: "Sequence[FlowRun]", grace: float) -> str:
    """Stops those flow runs of a run or a study that only the server knows. For the result and NotStoppedError see
    `end_everywhere`."""
    run_id, begun, status = run_id_of(found[-1]) or study_of(found[-1]), False, "cancelled"
    for flow_run in found:
        begun = begun or has_begun(flow_run)
        for _ in range(_ROUNDS):
            now = client.read_flow_run(flow_run.id)
            if _kind(now) in _EXECUTED:
                now = _stopped(home, client, now, grace)
            if _kind(now) not in OPEN:
                break
            end_flow_run(client, now, Ending("cancelled", "cancelled while it waited for a worker"))
        status = _status(client.read_flow_run(flow_run.id))
    return words(run_id, status, begun="elsewhere" if begun else "")


def ask_to_stop(client: "SyncPrefectClient", flow_run: "FlowRun", grace: float) -> None:
    """Asks the worker that executes a flow run, or is about to, to cancel it. A flow run without a live process
    stays as it is."""
    from prefect.states import Cancelling

    if _kind(flow_run) in ("PENDING", "RUNNING"):
        client.set_flow_run_state(flow_run.id, Cancelling(message=cancel_message(grace)))


def words(run_id: str, status: str, *, begun: str = "here") -> str:
    """Returns a sentence that says how a run that was asked to stop has ended.

    Args:
        begun: `here`, on record in this home; `elsewhere`, by a worker with another home; empty if it never began.
    """
    if status == "cancelled" and not begun:
        return f"{run_id} was waiting and is cancelled"
    if status == "cancelled" and begun == "elsewhere":
        return f"{run_id} is cancelled; if submitted again, it continues from its last checkpoint"
    if status == "cancelled":
        return f"{run_id} is cancelled; `rpg resume {run_id}` continues from its last checkpoint"
    if status == "finished":
        return f"{run_id} finished before it could stop"
    return f"{run_id} is {status}: it ended before it could stop; `rpg logs {run_id}` says more"


def _end_what_waits(home: Home, state: RunState, servers: Sequence[FlowRuns], *, was_executed: bool) -> str:
    """Gives a run's open flow runs on servers the recorded ending of the run."""
    run_id = state.path.parent.name
    deadline = time.monotonic() + (_TELLING_SECONDS if was_executed else 0.0)
    while (waited := _live(state, servers)) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)  # Its flow is about to report its end to the server itself.
    if not (waited or was_executed):
        raise EndedError(Issue(f"the run is not running but {state.status}", given=run_id))
    # It may have been submitted again during the wait for its flow.
    _end_for_good(home, run_id, Ending(state.status, ""), servers, of=state.record["flow_run_id"] or "")
    if was_executed:
        return words(run_id, state.status)
    return _taken_back(run_id, state.status)


def _taken_back(run_id: str, status: str) -> str:
    return f"{run_id} is {status} already; its pending flow runs on the server are withdrawn"


def _end_waiting(home: Home, state: RunState, own: "FlowRun | None", servers: Sequence[FlowRuns], grace: float) -> str:
    """Ends a run that, as far as this home knows, waits on a server. For the result and the errors see
    `end_everywhere`."""
    run_id, was_finished = state.path.parent.name, state.status == "finished"
    if own is None and not state.record.get("api_url"):
        hint = "name the server: `rpg cancel RUN --profile URL`"
        raise SpecError(Issue("this home does not know which Prefect server has the run", given=run_id, hint=hint))
    if own is None:
        _end_for_good(home, run_id, Ending("cancelled", "its flow run was deleted"), servers)
        hint = "no worker will start the run; `rpg submit FILE` submits it again"
        raise EndedError(Issue("the run's flow run was deleted on the server", given=run_id, hint=hint))
    begun = "here" if state.record["started_at"] else "elsewhere" if has_begun(own) else ""
    asked = _kind(own) in _EXECUTED
    if asked:
        client = next(server.client for server in servers if own in server.found)
        own = _stopped(home, client, own, grace)
        servers = [FlowRuns(client, _flow_runs(client, state)) for client, _ in servers]
    is_final = _kind(own) in ("COMPLETED", "FAILED", "CANCELLED")
    now: str = RunState(home, run_id).status
    if _kind(own) == "COMPLETED" and now == "pending":  # Its worker has the results in a home of its own.
        for client, found in servers:
            for flow_run in found:
                if flow_run.id != own.id:
                    end_flow_run(client, flow_run, Ending("cancelled", "another flow run has completed the run"))
        now = "finished"
    else:
        reason = "cancelled while it waited for a worker" if begun else "cancelled before it began"
        ending = ending_of(own) if is_final else Ending("cancelled", reason)
        now = _end_for_good(home, run_id, ending, servers).status
    if is_final and not asked:
        raise EndedError(Issue(f"the run is not running but {now}", given=run_id))
    if was_finished:
        return _taken_back(run_id, "finished")
    return words(run_id, now, begun=begun or ("here" if RunState(home, run_id).record["started_at"] else ""))


def _end_for_good(home: Home, run_id: str, ending: Ending, servers: Sequence[FlowRuns], *, of: str = "") -> Ending:
    """Ends a run on record and on the servers. Returns the run's ending, which is the earlier one if the run had
    already ended.

    Args:
        of: see `end_run`.
    """
    for _ in range(_ROUNDS):
        held = end_run(home, run_id, ending, *servers, of=of) or ending
        state = RunState(home, run_id)
        servers = [FlowRuns(client, _flow_runs(client, state)) for client, _ in servers]
        if not _live(state, servers, look=False):
            break
    return held


def _stopped(home: Home, client: "SyncPrefectClient", flow_run: "FlowRun", grace: float) -> "FlowRun":
    """Asks the worker that executes a flow run to stop, and waits until no worker executes it. Returns the flow run,
    which then has ended or waits.

    Raises:
        NotStoppedError: it is still executed.
    """
    deadline = time.monotonic() + grace + CLOSING_SECONDS + _NOTICE_SECONDS
    while _kind(flow_run) in _EXECUTED:
        # Again: a flow that is given back at the same time may be scheduled, and begun, once more.
        ask_to_stop(client, flow_run, grace)
        if time.monotonic() > deadline:
            name, status = run_id_of(flow_run) or study_of(flow_run), _status(flow_run)
            link = flow_run_link(home, str(client.api_url), str(flow_run.id))
            raise NotStoppedError(f"{name} was asked to stop and is still {status} on the server: {link}")
        time.sleep(_LOOK_SECONDS)
        flow_run = client.read_flow_run(flow_run.id)
    return flow_run


def _answers(url: str, silent: set[str]) -> bool:
    """Returns whether a server answers. Does not wait again for a server that has not answered; for `silent` see
    `end_everywhere`."""
    if url not in silent and not is_healthy(url, timeout=10.0):
        silent.add(url)
    return url not in silent


@contextlib.contextmanager
def _servers(home: Home, state: RunState, silent: set[str]) -> Iterator[list[FlowRuns]]:
    """Yields the servers that may have flow runs of a run, each with these flow runs: the recorded one, and any other
    that has not ended.

    Raises:
        SpecError: the server that the run waits on does not answer.
    """
    services, submitted_to = running_services(home), state.record.get("api_url") or ""
    urls = dict.fromkeys([submitted_to, services.url if services else ""])
    with contextlib.ExitStack() as clients:
        servers = []
        for url in filter(None, urls):
            if _answers(url, silent):
                client = clients.enter_context(prefect_client(home, url))
                servers.append(FlowRuns(client, _flow_runs(client, state)))
            elif url == submitted_to and state.waits:
                message = f"the Prefect server at {url}, which has the run, does not answer"
                hint = "repeat the command when the server answers again"
                raise SpecError(Issue(message, given=state.path.parent.name, hint=hint))
        yield servers


def _flow_runs(client: "SyncPrefectClient", state: RunState) -> "list[FlowRun]":
    """Returns the recorded flow run, if the server has it, and other flow runs of this run that have not ended."""
    from prefect.exceptions import ObjectNotFound

    run_id, identity = state.path.parent.name, read_json(state.path.parent / "run.json")
    found = {}
    if state.record["flow_run_id"]:
        with contextlib.suppress(ObjectNotFound):
            own = client.read_flow_run(UUID(state.record["flow_run_id"]))
            found[own.id] = own
    if identity:
        named = flow_runs(client, LIVE, name=f"{identity.get('experiment')}: {identity.get('name')}")
        found |= {other.id: other for other in named if run_id_of(other) == run_id}
    return list(found.values())


def _own(state: RunState, servers: Iterable[FlowRuns]) -> "FlowRun | None":
    """Returns a run's recorded flow run; None if no server has it."""
    found = (flow_run for server in servers for flow_run in server.found)
    return next((flow_run for flow_run in found if str(flow_run.id) == state.record["flow_run_id"]), None)


def _live(state: RunState, servers: Sequence[FlowRuns], *, look: bool = True) -> bool:
    """Returns whether a server has an open flow run of a run.

    Args:
        look: ask the servers again.
    """
    found = (_flow_runs(client, state) if look else before for client, before in servers)
    return any(_kind(flow_run) in LIVE for of_server in found for flow_run in of_server)


def _kind(flow_run: "FlowRun") -> str:
    return str(state_of(flow_run).type.value)


def _status(flow_run: "FlowRun") -> str:
    return _STATUS.get(_kind(flow_run), _kind(flow_run).lower())
