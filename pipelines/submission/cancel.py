"""What another command can do with runs: stop them, or take their frozen spec to go on with them."""

import contextlib
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from pipelines.home import Home
from pipelines.launchers import concurrent_directory, launchers
from pipelines.processes.lease import RunBusyError, acquire
from pipelines.processes.reap import end_left_process
from pipelines.processes.stop import cancel_message, clear_request, request_cancel
from pipelines.server.api import is_healthy
from pipelines.server.client import prefect_client
from pipelines.state import RunState
from pipelines.submission.submit import flow_run_link
from pipelines.versions import runs_of, split_name
from rpg.files import now, read_json
from specs.errors import Issue, SpecError, render_one
from storage import liveness

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from specs.loader import Document

_CLOSING_SECONDS = 15.0
"""How long a flow takes at most, after its stage has ended, to record that it was cancelled."""
_NOTICE_SECONDS = 30.0
"""How long a worker takes at most to notice that one of its flow runs is to be cancelled."""

_UNDER_WAY = ("pending", "running", "paused", "cancelling")
"""A flow run that has not ended, as `_standing` calls it."""


class NotStoppedError(Exception):
    """A run was asked to stop and has not stopped yet."""


class _EndedError(SpecError):
    """The run is not running and waits nowhere any more; the issue says how it stands."""


def frozen_document(home: Home, run_id: str, experiment: str = "") -> "Document":
    """The document that a run was last executed from.

    Args:
        experiment: whose frozen document is taken where the run was never begun.
    Raises:
        SpecError: there is none.
    """
    from specs.loader import Document

    frozen = read_json(home.run(run_id) / "document.json")
    if not frozen and experiment:
        frozen = read_json(home.experiment(split_name(experiment)[0]) / "spec.json")
    if not frozen:
        raise SpecError(Issue("the run has no frozen spec", given=run_id, hint="`rpg run FILE` goes on with it"))
    return Document.from_json(frozen)


def cancel_run(home: Home, run_id: str, grace: float) -> str:
    """Stops a run and waits until it has stopped. Returns how it ended, in words.

    A run that this home does not know to have begun is cancelled on the server that it was submitted to: it may be
    waiting there, or a worker with another home may execute it.

    Args:
        grace: seconds after which what still runs is killed.
    Raises:
        SpecError: there is nothing to stop, or the server does not answer or does not have the run.
        NotStoppedError: the run was asked to stop and has not stopped yet.
    """
    state = RunState(home, run_id)
    if _is_submitted(state):
        return _cancel_submitted(home, state, grace)
    if not _is_running(state):
        raise _EndedError(Issue(f"the run is not running but {state.status}", given=run_id))
    request_cancel(home.run(run_id), grace)
    return _wait_for_end(home, run_id, grace)


def cancel_experiment(home: Home, name: str, grace: float) -> Iterator[str]:
    """Stops all runs that an experiment has now, wherever they are executed or wait. Yields how each ended, in words.

    A command that goes through the experiment's runs begins none after the one under way.

    Args:
        grace: seconds after which what still runs is killed.
    Raises:
        SpecError: none of its runs is running or waits on a server; or, at the end, some could not be asked to stop.
        NotStoppedError: at the end, where some were asked to stop and have not stopped yet; the message has them, and
            those that could not be asked.
    """
    states = {run_id: RunState(home, run_id) for run_id in runs_of(home, name)}
    running = [run_id for run_id, state in states.items() if _is_running(state)]
    submitted = [run_id for run_id, state in states.items() if _is_submitted(state) and run_id not in running]
    if not running and not submitted:
        raise SpecError(Issue("no run of the experiment is running or waits on a server", given=name))
    request_cancel(home.experiment(split_name(name)[0]), grace, list(states))
    for run_id in running:
        request_cancel(home.run(run_id), grace)
    unstopped: list[str] = []
    refused: dict[Issue, str] = {}  # what kept runs from being asked -> the server that it concerns
    for run_id in [*submitted, *running]:
        url: str = states[run_id].record.get("api_url", "")
        if run_id in submitted and url in refused.values():
            continue
        try:
            if run_id in running:
                yield _wait_for_end(home, run_id, grace)
            else:
                yield _cancel_submitted(home, states[run_id], grace)
        except NotStoppedError as error:
            unstopped.append(str(error))
        except _EndedError as error:
            yield f"{run_id}: {error.issues[0].message}"
        except SpecError as error:
            refused |= dict.fromkeys(error.issues, url)
    if unstopped:
        raise NotStoppedError("\n".join([*unstopped, *map(render_one, refused)]))
    if refused:
        raise SpecError(*refused, done="the runs that it has go on")


def _is_running(state: RunState) -> bool:
    """Whether the run is executed, or was and has crashed."""
    return state.status == "running" or liveness.is_executed(state.path.parent, state.record)


def _is_submitted(state: RunState) -> bool:
    """Whether the run waits on a server, as far as this home knows."""
    return state.status == "pending" and state.record["flow_run_id"] is not None


def _wait_for_end(home: Home, run_id: str, grace: float) -> str:
    """Waits for the end of a run that was asked to stop. Result and NotStoppedError are as of `cancel_run`."""
    # Long enough to see that the heartbeat of a host which has failed is missing.
    deadline = time.monotonic() + max(grace + _CLOSING_SECONDS, liveness.LEASE_SECONDS + 1)
    while _is_running(state := RunState(home, run_id)):
        if not liveness.is_executed(state.path.parent, state.record):
            with contextlib.suppress(RunBusyError):  # just taken over: whoever did that has the request
                return _end_crashed(home, run_id)
        if time.monotonic() > deadline:
            return _give_up(home, run_id)
        time.sleep(0.1)
    if _is_submitted(state):  # Its worker was stopped at the same time, and gave it back to the queue.
        return _cancel_submitted(home, state, grace)
    return ending(run_id, state.status)


def _end_crashed(home: Home, run_id: str) -> str:
    """Takes a run that nobody executes any more, so that nobody who comes back writes into it, and ends it for good."""
    with acquire(home.run(run_id)) as lease:
        state = RunState(home, run_id, lease.fence)
        if state.status != "running":
            return ending(run_id, state.status)
        _end_work(home, run_id)
        clear_request(home.run(run_id))
        state.update(status="cancelled", reason="cancelled after a crash", ended_at=now(), pid=None, pid_started=None)
    return f"{run_id} had crashed; it is marked cancelled"


def _give_up(home: Home, run_id: str) -> str:
    """What holds of a run whose holder lives and does not answer. What it started is ended where that is this host."""
    lease = liveness.newest_lease(home.run(run_id))
    if lease is None or lease.is_of_this_host:
        _end_work(home, run_id)
        return f"{run_id} did not answer; what it had started was ended"
    ends = datetime.fromisoformat(lease.at) + timedelta(seconds=liveness.LEASE_SECONDS)
    raise NotStoppedError(
        f"{run_id} did not answer; the node {lease.host}, which executes it, may be away; its lease ends at"
        f" {ends:%H:%M:%S} UTC unless that node renews it; the request to stop stays"
    )


def ending(run_id: str, status: str) -> str:
    """How a run ended that was asked to stop, in words."""
    if status == "cancelled":
        return f"{run_id} is cancelled; `rpg resume {run_id}` goes on from its last checkpoint"
    if status == "finished":
        return f"{run_id} finished before it could stop"
    return f"{run_id} is {status}: it ended before it could stop; `rpg logs {run_id}` says more"


def _cancel_submitted(home: Home, state: RunState, grace: float) -> str:
    """Has the server cancel the flow run that a run waits for. Result and errors are as of `cancel_run`."""
    run_id, url, flow_run_id = state.path.parent.name, state.record["api_url"], UUID(state.record["flow_run_id"])
    if not is_healthy(url, timeout=10.0):
        message = f"the Prefect server at {url}, which has the run, does not answer"
        raise SpecError(Issue(message, given=run_id, hint="the same command works when it answers again"))
    with prefect_client(home, url) as client:
        from prefect.exceptions import ObjectNotFound

        try:
            status, _ = _standing(client, flow_run_id)
            if status not in _UNDER_WAY:
                raise _EndedError(Issue(f"the run is not running but {status}", given=run_id))
            status, began = _cancel_flow_run(client, flow_run_id, grace)
        except ObjectNotFound:
            RunState(home, run_id).update(status="cancelled", reason="its flow run was deleted", ended_at=now())
            hint = "no worker will begin it any more; `rpg submit FILE` hands it over again"
            issue = Issue("the run's flow run was deleted on the server", given=run_id, hint=hint)
            raise _EndedError(issue) from None
    if status in _UNDER_WAY:
        link = flow_run_link(home, url, str(flow_run_id))
        raise NotStoppedError(f"{run_id} was asked to stop and is still {status} on the server: {link}")
    state = RunState(home, run_id)
    if state.status != "pending":  # A worker that shares this home has begun it meanwhile.
        return ending(run_id, state.status)
    if status != "cancelled":
        return ending(run_id, status)
    state.update(status="cancelled", reason="cancelled on the server", ended_at=now())
    if not began:
        return f"{run_id} was waiting and is cancelled"
    return f"{run_id} is cancelled; submitted again, it goes on from its last checkpoint"


def _cancel_flow_run(client: "SyncPrefectClient", flow_run_id: UUID, grace: float) -> tuple[str, bool]:
    """Sets a flow run Cancelling, which the server refuses where it has ended. Waits for its end as long as that takes.

    Args:
        grace: seconds after which its flow kills what still runs.
    Returns:
        What `_standing` says of it then.
    """
    from prefect.states import Cancelling

    client.set_flow_run_state(flow_run_id, Cancelling(message=cancel_message(grace)))
    deadline = time.monotonic() + grace + _CLOSING_SECONDS + _NOTICE_SECONDS
    while (standing := _standing(client, flow_run_id))[0] in _UNDER_WAY and time.monotonic() < deadline:
        time.sleep(0.5)
    return standing


def _standing(client: "SyncPrefectClient", flow_run_id: UUID) -> tuple[str, bool]:
    """What a flow run's state is called of a run, and whether a worker has ever begun it."""
    flow_run = client.read_flow_run(flow_run_id)
    kind = flow_run.state_type.value if flow_run.state_type else "PENDING"
    status = {"COMPLETED": "finished", "SCHEDULED": "pending"}.get(kind, kind.lower())
    return status, flow_run.start_time is not None


def _end_work(home: Home, run_id: str) -> None:
    """Ends what the run's flow had started, here and elsewhere."""
    end_left_process(home.run(run_id))
    # Every kind: the run may have been started before by another launcher than the one that its spec names now.
    for launcher in launchers():
        for directory in (home.run(run_id), concurrent_directory(home.run(run_id))):
            launcher.end(directory)
