"""A thread that sends a flow's pending messages to Prefect while its stages work, and reads the server's requests to
stop.

An outage of the server, of its database or of the network never reaches a stage. A message waits until the server
accepts it; a newer one of the same key replaces it. Messages that are unsent when the flow ends are kept on disk, and
`deliver` sends them later.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from pipelines.home.home import Home
from pipelines.prefect.server.deployments import record_pages
from pipelines.prefect.server.flow_runs import set_state
from pipelines.processes.stop import GIVEN_BACK, StopRequest, cancel_grace, give_back_grace
from pipelines.running.messages import Message, Messages
from specs.machine.files import read_json, write_json

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

_log = logging.getLogger(__name__)
_ROUND_SECONDS = 2.5
"""Seconds between two reads of the flow run's state on the server; messages are sent after each."""
_REQUEST_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 10.0
"""Longest time in seconds between two rounds while the server does not answer."""
_LAST_PAUSE_SECONDS = 0.5
"""Seconds between two rounds once the flow has ended and waits for them."""
SUSPENDED = "suspended on the server"
_REFUSED = {400, 404, 405, 409, 413, 422}
"""HTTP statuses after which the server would refuse the same message again."""


class Outbox(Messages):
    """Pending messages of one flow run, and the server's last request to stop.

    They are sent in rounds, so that a value that changes often, such as a progress bar, is sent in its latest state.
    Without a flow run (the server was unreachable when the run began) messages are dropped and nothing is read.
    """

    def __init__(self, home: Home, flow_run_id: str | None) -> None:
        super().__init__(flow_run_id)
        self._file = unsent_file(home, flow_run_id or "")
        self._artifacts: dict[str, UUID] = {}
        """The artifacts of the flow run that this process has sent, by key."""
        self._closing, self._delivered = threading.Event(), threading.Event()
        self._given_up = self._schedule = False

    def start(self) -> None:
        """Begins to send messages and to read the flow run's state. Call it while Prefect's settings are in force."""
        if self.flow_run_id is not None:
            arguments = (_client_settings(), UUID(self.flow_run_id))
            threading.Thread(target=self._work, args=arguments, name="outbox", daemon=True).start()

    def close(self, seconds: float, *, schedule: bool = False) -> bool:
        """Waits until everything is sent and the server has answered once more, but at most `seconds`. Then stops
        sending.

        Returns whether everything was sent. Unsent messages are kept on disk for `deliver`.

        Args:
            schedule: then schedules the flow run again, for any worker of its pool.
        """
        self._schedule = schedule
        self._closing.set()
        self._given_up = not self._delivered.wait(seconds if self.flow_run_id else 0.0)
        if self._given_up and self.flow_run_id:
            with self.lock:
                unsent = [asdict(message) for message in self.waiting.values()]
            if unsent:
                write_json(self._file, {"messages": unsent})
        return not self._given_up

    def _work(self, settings: dict[Any, Any], flow_run_id: UUID) -> None:
        from prefect.client.orchestration import get_client
        from prefect.settings import temporary_settings

        failures = 0
        with temporary_settings(settings), get_client(sync_client=True) as client:
            while not self._given_up:
                last_round = self._closing.is_set()
                try:
                    self._ask(client, flow_run_id)
                    if self.record_url is None:
                        self.record_url = record_pages(client)
                    self._send_all(client)
                    done = not (last_round and self._schedule) or self._give_back(client, flow_run_id)
                    failures = 0 if done else failures + 1
                except Exception as error:  # Any exception: the stage continues, and the next round retries.
                    failures += 1
                    _log.debug("the Prefect server does not answer: %s", error)
                if last_round and not failures:
                    self._delivered.set()
                    return
                if last_round:
                    time.sleep(_LAST_PAUSE_SECONDS)
                else:
                    self._closing.wait(min(_LONGEST_PAUSE_SECONDS, _ROUND_SECONDS * 2**failures))

    def _ask(self, client: "SyncPrefectClient", flow_run_id: UUID) -> None:
        """Reads the flow run's state on the server."""
        from prefect.exceptions import ObjectNotFound

        with contextlib.suppress(ObjectNotFound):
            self.request = stop_request(client.read_flow_run(flow_run_id))

    def _give_back(self, client: "SyncPrefectClient", flow_run_id: UUID) -> bool:
        """Schedules the flow run again. Returns False if its state has just changed, so that it must be read again."""
        from prefect.exceptions import ObjectNotFound

        with contextlib.suppress(ObjectNotFound):
            flow_run = client.read_flow_run(flow_run_id)
            self.request = stop_request(flow_run)
            # It was cancelled after its run was given back, and has ended.
            if not (self.request and self.request.status == "cancelled"):
                return schedule_again(client, flow_run, GIVEN_BACK)
        return True

    def _send_all(self, client: "SyncPrefectClient") -> None:
        while True:
            with self.lock:
                entry = next(iter(self.waiting.items()), None)
            if entry is None:
                return
            key, message = entry
            self._send(client, key, message)
            with self.lock:
                # A newer message of this key may have replaced it meanwhile.
                if self.waiting.get(key) is message:
                    del self.waiting[key]

    def _send(self, client: "SyncPrefectClient", key: str, message: Message) -> None:
        with _refusals_noted(key):
            sent = send(client, message, self._artifacts.get(key))
            if message.kind == "artifact" and sent is not None:
                self._artifacts[key] = sent


def stop_request(flow_run: "FlowRun") -> StopRequest | None:
    """Returns the request to stop that the server's state of a flow run stands for.

    A suspended flow run without a deployment is cancelled: no worker would take it when it is resumed.
    """
    state = flow_run.state
    if state is not None and (state.is_cancelling() or state.is_cancelled()):
        return StopRequest("cancelled", cancel_grace(state.message), whole_command=False)
    if state is not None and state.is_paused():
        status: Literal["cancelled", "pending"] = "pending" if flow_run.deployment_id else "cancelled"
        return StopRequest(SUSPENDED, give_back_grace(), whole_command=False, status=status)
    return None


def send(client: "SyncPrefectClient", message: Message, present: UUID | None = None) -> UUID | None:
    """Sends one message. Returns the id of an artifact.

    Args:
        present: the artifact that it replaces, if the caller knows it; else the server is asked.
    """
    from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate, LogCreate

    fields = _without_nul(message.fields)
    if message.kind == "log":
        client.create_logs([LogCreate.model_validate(fields)])
        return None
    if message.kind == "event":
        client.request("POST", "/events", json=[fields])
        return None
    if present := present or _present(client, message):
        # Each further artifact of a flow run would stay as a chip of its own on the dashboard's graph.
        client.update_artifact(present, ArtifactUpdate(data=fields["data"], description=fields.get("description")))
        return present
    return client.create_artifact(ArtifactCreate.model_validate(fields)).id


def _present(client: "SyncPrefectClient", message: Message) -> UUID | None:
    """Returns the server's artifact of a message's key, if the message replaces it."""
    from prefect.client.schemas.filters import ArtifactCollectionFilter, ArtifactCollectionFilterKey

    of_key = ArtifactCollectionFilter(key=ArtifactCollectionFilterKey(any_=[message.fields["key"]]))
    latest = client.read_latest_artifacts(artifact_filter=of_key)
    if not latest or (message.kind == "artifact" and str(latest[0].flow_run_id) != message.fields.get("flow_run_id")):
        return None
    return latest[0].latest_id


def _without_nul(value: Any) -> Any:
    """Returns plain data without NUL characters: a process may print them, but PostgreSQL does not accept them in
    texts."""
    if isinstance(value, str):
        return value.replace("\0", "")
    if isinstance(value, dict):
        return {_without_nul(key): _without_nul(item) for key, item in value.items()}
    return [_without_nul(item) for item in value] if isinstance(value, list) else value


def schedule_again(client: "SyncPrefectClient", flow_run: "FlowRun", reason: str) -> bool:
    """Lets any worker of the flow run's pool take it, unless its state has changed since it was read, for example
    because it was cancelled. The flow run keeps its place in the queue, before all that were submitted later.

    Returns whether it was scheduled.
    """
    from prefect.states import Scheduled

    before = [state for state in client.read_flow_run_states(flow_run.id) if state.is_scheduled()]
    place = max(before, key=lambda state: state.timestamp).state_details.scheduled_time if before else None
    state: State[Any] = Scheduled(scheduled_time=place or flow_run.expected_start_time, message=reason)
    return set_state(client, flow_run, state)


def deliver(client: "SyncPrefectClient", home: Home) -> None:
    """Sends the unsent messages of flows that have ended. Raises the client's exception while the server does not
    answer."""
    for path in sorted(unsent_file(home, "").parent.glob("*.json")):
        for fields in read_json(path).get("messages", []):
            with _refusals_noted(path.stem):
                send(client, Message(**fields))
        path.unlink(missing_ok=True)


def unsent_file(home: Home, flow_run_id: str) -> Path:
    """Returns the file with the unsent messages of a flow that has ended."""
    return home.prefect / "unsent" / f"{flow_run_id}.json"


@contextlib.contextmanager
def _refusals_noted(name: str) -> Iterator[None]:
    """Skips a message that the server will never accept."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in _REFUSED:
            raise
        _log.warning("the Prefect server refused %s: %s", name, error)
    except (ValueError, TypeError) as error:
        _log.warning("%s cannot be sent to the Prefect server: %s", name, error)


def _client_settings() -> dict[Any, Any]:
    """Returns the settings of the thread's own client: the caller's server, no retries, and a short timeout."""
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_KEY,
        PREFECT_API_REQUEST_TIMEOUT,
        PREFECT_API_URL,
        PREFECT_CLIENT_MAX_RETRIES,
        PREFECT_HOME,
    )

    taken = {setting: setting.value() for setting in (PREFECT_API_URL, PREFECT_API_AUTH_STRING, PREFECT_API_KEY)}
    return taken | {
        PREFECT_HOME: PREFECT_HOME.value(),
        PREFECT_CLIENT_MAX_RETRIES: 0,
        PREFECT_API_REQUEST_TIMEOUT: _REQUEST_SECONDS,
    }
