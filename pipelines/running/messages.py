"""Messages of a run to a Prefect server, which displays it, and the server's requests to stop."""

import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import uuid4

from pipelines.processes.stop import StopRequest
from specs.secrets import hide


@dataclass(frozen=True, slots=True)
class Message:
    """An artifact, a log line or an event, as plain data."""

    kind: Literal["artifact", "page", "log", "event"]
    """artifact: replaces the flow run's artifact with the same key on the server. page: an artifact without a flow run,
    which replaces the server's artifact with the same key."""
    fields: dict[str, Any]
    """Fields of Prefect's ArtifactCreate, LogCreate or Event, as JSON."""


class Messages:
    """Pending messages. A newer message replaces an older one with the same key.

    `pipelines.prefect.server.outbox` sends them; without it they are dropped.
    """

    def __init__(self, flow_run_id: str | None = None) -> None:
        self.flow_run_id = flow_run_id
        self.request: StopRequest | None = None
        """The server's request to stop, after the flow run was cancelled, paused or suspended there; None before."""
        self.record_url: str | None = None
        """URL of the record's report pages; empty if the server names none, None until it has answered."""
        self.lock = threading.Lock()
        self.waiting: dict[str, Message] = {}
        self._lines = 0

    def artifact(self, key: str, kind: Literal["markdown", "table", "progress"], data: Any, description: str) -> None:
        """Shows an artifact on the dashboard. It replaces the flow run's artifact with this key.

        Args:
            data: Markdown, a table's rows, or percent done.
        """
        fields = {"key": key, "type": kind, "description": description}
        self._put(key, "artifact", fields | {"data": json.dumps(data) if kind == "table" else data})

    def page(self, key: str, text: str, description: str) -> None:
        """Shows a Markdown page that does not belong to a flow run. It replaces the server's page with this key."""
        self._put(key, "page", {"key": key, "type": "markdown", "description": description, "data": text})

    def log(self, text: str, *, level: int = logging.INFO, key: str = "") -> None:
        """Adds a line to the flow run's log.

        Args:
            key: an unsent line of this key is replaced; empty keeps every line.
        """
        self._lines += 1
        timestamp = datetime.now(UTC).isoformat()
        fields = {"name": "prefect.flow_runs", "level": level, "message": text, "timestamp": timestamp}
        self._put(key or f"line {self._lines}", "log", fields)

    def event(self, name: str, resource: str, payload: dict[str, Any], tags: Sequence[str]) -> None:
        """Emits a Prefect event of this flow run. The server's automations may wait for it.

        Args:
            resource: Prefect's id of the event's subject.
            payload: values for an automation's texts; its `message` may be output of a stage.
            tags: tags of the flow run, by which automations select events.
        """
        related = [
            (f"prefect.flow-run.{self.flow_run_id}", "flow-run"),
            *((f"prefect.tag.{tag}", "tag") for tag in tags),
        ]
        event_id = str(uuid4())
        fields = {
            "id": event_id,
            "event": name,
            "occurred": datetime.now(UTC).isoformat(),
            "resource": {"prefect.resource.id": resource},
            "related": [{"prefect.resource.id": name, "prefect.resource.role": role} for name, role in related],
            "payload": payload | {"message": hide(payload["message"])},
        }
        with self.lock:
            self.waiting[event_id] = Message("event", fields)

    def _put(self, key: str, kind: Literal["artifact", "page", "log"], fields: dict[str, Any]) -> None:
        from prefect.runtime import task_run

        text = "message" if kind == "log" else "data"
        if isinstance(fields[text], str):
            fields[text] = hide(fields[text])
        if kind != "page":
            fields |= {"flow_run_id": self.flow_run_id, "task_run_id": task_run.id}
        with self.lock:
            self.waiting.pop(key, None)
            self.waiting[key] = Message(kind, fields)
