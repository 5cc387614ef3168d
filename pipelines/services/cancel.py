"""What another command can do with a run: stop it, or take its frozen spec to go on with it."""

import time
from typing import TYPE_CHECKING
from uuid import UUID

from pipelines.home import Home
from pipelines.launchers import launchers
from pipelines.processes.reap import ProcessRecord, end
from pipelines.processes.stop import request_cancel
from pipelines.services.client import prefect_client
from pipelines.services.server import is_healthy
from pipelines.services.submit import flow_run_link
from pipelines.state import RunState
from rpg.files import now, read_json
from specs.errors import Issue, SpecError
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


def frozen_document(home: Home, run_id: str) -> "Document":
    """The document that a run was last executed from. Raises SpecError where there is none."""
    from specs.loader import Document

    frozen = read_json(home.run(run_id) / "document.json")
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
    if state.status == "pending" and state.record["flow_run_id"]:
        return _cancel_submitted(home, run_id, state.record["api_url"], UUID(state.record["flow_run_id"]), grace)
    if state.status != "running":
        raise SpecError(Issue(f"the run is not running but {state.status}", given=run_id))
    if not _executing(state):
        _end_child(home, run_id)
        state.update(status="cancelled", reason="cancelled after a crash", ended_at=now(), pid=None, pid_started=None)
        return f"{run_id} had crashed; it is marked cancelled"
    request_cancel(home, run_id, grace)
    deadline = time.monotonic() + grace + _CLOSING_SECONDS
    while (state := RunState(home, run_id)).status == "running" and _executing(state):
        if time.monotonic() > deadline:
            _end_child(home, run_id)
            return f"{run_id} did not answer; what it had started was ended"
        time.sleep(0.1)
    return ending(run_id, state.status)


def ending(run_id: str, status: str) -> str:
    """How a run ended that was asked to stop, in words."""
    if status == "cancelled":
        return f"{run_id} is cancelled; `rpg resume {run_id}` goes on from its last checkpoint"
    if status == "finished":
        return f"{run_id} finished before it could stop"
    return f"{run_id} is {status}: it ended before it could stop; `rpg logs {run_id}` says more"


def _cancel_submitted(home: Home, run_id: str, url: str, flow_run_id: UUID, grace: float) -> str:
    """Has the server cancel the flow run that a run waits for. Arguments, result and errors are as of `cancel_run`."""
    if not is_healthy(url, timeout=10.0):
        raise SpecError(Issue(f"the Prefect server at {url}, which has the run, does not answer", given=run_id))
    with prefect_client(home, url) as client:
        from prefect.exceptions import ObjectNotFound

        try:
            status, _ = _standing(client, flow_run_id)
            if status not in _UNDER_WAY:
                raise SpecError(Issue(f"the run is not running but {status}", given=run_id))
            status, began = _cancel_flow_run(client, flow_run_id, grace + _CLOSING_SECONDS + _NOTICE_SECONDS)
        except ObjectNotFound:
            RunState(home, run_id).update(status="cancelled", reason="its flow run was deleted", ended_at=now())
            hint = "no worker will begin it any more; `rpg submit FILE` hands it over again"
            raise SpecError(Issue("the run's flow run was deleted on the server", given=run_id, hint=hint)) from None
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


def _cancel_flow_run(client: "SyncPrefectClient", flow_run_id: UUID, seconds: float) -> tuple[str, bool]:
    """Sets a flow run Cancelling, which the server refuses where it has ended. Waits for its end, so long at most.

    Returns:
        What `_standing` says of it then.
    """
    from prefect.states import Cancelling

    client.set_flow_run_state(flow_run_id, Cancelling(message="rpg cancel"))
    deadline = time.monotonic() + seconds
    while (standing := _standing(client, flow_run_id))[0] in _UNDER_WAY and time.monotonic() < deadline:
        time.sleep(0.5)
    return standing


def _standing(client: "SyncPrefectClient", flow_run_id: UUID) -> tuple[str, bool]:
    """What a flow run's state is called of a run, and whether a worker has ever begun it."""
    flow_run = client.read_flow_run(flow_run_id)
    kind = flow_run.state_type.value if flow_run.state_type else "PENDING"
    status = {"COMPLETED": "finished", "SCHEDULED": "pending"}.get(kind, kind.lower())
    return status, flow_run.start_time is not None


def _executing(state: RunState) -> bool:
    """Whether the process that executes the run is alive."""
    return liveness.is_executed(state.path.parent, state.record)


def _end_child(home: Home, run_id: str) -> None:
    """Ends what the run's flow had started, here and elsewhere."""
    path = home.run(run_id) / "process.json"
    if record := ProcessRecord.read(path):
        end(record, grace=0.0)
        path.unlink(missing_ok=True)
    # Every kind: the run may have been started before by another launcher than the one that its spec names now.
    for launcher in launchers():
        launcher.end(home.run(run_id))
