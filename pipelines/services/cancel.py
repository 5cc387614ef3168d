"""What another command can do with a run: stop it, or take its frozen spec to go on with it."""

import time
from typing import TYPE_CHECKING

from pipelines.home import Home
from pipelines.launchers import launchers
from pipelines.processes.reap import ProcessRecord, end
from pipelines.processes.stop import request_cancel
from pipelines.state import RunState
from rpg.files import now, read_json
from specs.errors import Issue, SpecError
from storage import liveness

if TYPE_CHECKING:
    from specs.loader import Document

_CLOSING_SECONDS = 15.0
"""How long a flow takes at most, after its stage has ended, to record that it was cancelled."""


def frozen_document(home: Home, run_id: str) -> "Document":
    """The document that a run was last executed from. Raises SpecError where there is none."""
    from specs.loader import Document

    frozen = read_json(home.run(run_id) / "document.json")
    if not frozen:
        raise SpecError(Issue("the run has no frozen spec", given=run_id, hint="`rpg run FILE` goes on with it"))
    return Document.from_json(frozen)


def cancel_run(home: Home, run_id: str, grace: float) -> str:
    """Stops a run that this host executes, and waits until it has stopped. Returns what was done, in words.

    Args:
        grace: seconds after which what still runs is killed.
    Raises:
        SpecError: there is nothing to stop.
    """
    state = RunState(home, run_id)
    if state.status == "pending" and state.record["flow_run_id"]:
        from pipelines.services.submit import cancel_flow_run

        cancel_flow_run(home, state.record["api_url"], state.record["flow_run_id"])
        state.update(status="cancelled", reason="cancelled before it began", ended_at=now())
        return f"{run_id} was waiting and is cancelled"
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
    return f"{run_id} is {state.status}; `rpg resume {run_id}` goes on from its last checkpoint"


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
