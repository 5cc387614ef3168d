"""A run's documents: run.json, its definition, written once; and state.json, its state, replaced at every change.

Only the process that holds the run's lease writes state.json. Any process may read it at any moment and finds it whole.

These methods alone change the status of a run:

| method      | pending, failed, cancelled | running      | finished                           |
|-------------|----------------------------|--------------|------------------------------------|
| `submitted` | pending                    | pending      | finished, and waits for its worker |
| `begin`     | running                    | running      | finished                           |
| `work`      | running                    | running      | running: a stage is done again     |
| `end`       | the ending                 | the ending   | finished, with its own ending      |

So a finished run stays finished until one of its stages is done again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pipelines.home.home import Home
from specs.machine.fence import Fence
from specs.machine.files import DiskError, explained, now, read_json, sync, write_json
from specs.machine.liveness import FINAL
from specs.secrets import hide

Status = Literal["pending", "running", "finished", "failed", "cancelled"]
SUBMITTED = "submitted"
"""Reason of a run that waits for its first worker, or of a finished run that waits for a worker to do more."""
_RESERVED_BYTES = 64 << 10
"""Bytes reserved for the record of a run's end, in case the disk is full by then."""
WAITING = "waiting for a worker"
"""Reason of a pending run that was started before: any worker of its pool resumes it."""
Record = dict[str, Any]


class RunState:
    """A run's state.json, written to disk at every change."""

    def __init__(self, home: Home, run_id: str, fence: Fence | None = None) -> None:
        """Reads the state.

        Args:
            fence: fence of the lease under which this process writes. None for a reader, or before the first start.
        """
        self._fence = fence
        self.path = home.run(run_id) / "state.json"
        self._reserve = home.run(run_id) / ".state.reserve"
        empty: Record = {
            "status": "pending",
            "started_at": None,
            "ended_at": None,
            "reason": "",
            "pid": None,
            "pid_started": None,
            "host": None,
            "flow_run_id": None,
            "evaluation": None,
            "stages": {},
        }
        self.record = empty | read_json(self.path)

    @property
    def status(self) -> Status:
        """Returns the recorded status: a run whose process died still says `running`; see `runs.status_of`."""
        status: Status = self.record["status"]
        return status

    def stage(self, name: str) -> Record:
        """Returns the record of a stage; empty if it never started."""
        record: Record = self.record["stages"].get(name, {})
        return record

    @property
    def waits(self) -> bool:
        """Returns whether, as far as this home knows, a flow run of the run waits for a worker."""
        asked = self.status == "pending" or (self.status == "finished" and self.record["reason"] == SUBMITTED)
        return asked and self.record["flow_run_id"] is not None

    @property
    def is_over(self) -> bool:
        """Returns whether the run has ended and no flow run of it waits: it will not change any more."""
        return self.status in FINAL and not self.waits

    def submitted(self, flow_run_id: str, api_url: str) -> None:
        """Records that a flow run waits for a worker. Does not wait for the disk, because the server also has the flow
        run."""
        status = "finished" if self.status == "finished" else "pending"
        self.record |= {"status": status, "reason": SUBMITTED, "flow_run_id": flow_run_id, "api_url": api_url}
        write_json(self.path, self.record, durable=False)

    def begin(self, **fields: Any) -> None:
        """Records that this process executes the run from now on. A finished run stays finished until `work`."""
        with explained(self._reserve):
            self._reserve.parent.mkdir(parents=True, exist_ok=True)
            self._reserve.write_bytes(bytes(_RESERVED_BYTES))
        self.update(**(fields if self.status == "finished" else fields | self._running()))

    def work(self) -> None:
        """Records that a stage is running from now on, also for a finished run."""
        if self.status == "finished":
            self.update(**self._running())

    def _running(self) -> Record:
        started_at = self.record["started_at"] or now()
        return {"status": "running", "reason": "", "cause": None, "started_at": started_at, "ended_at": None}

    def update(self, **fields: Any) -> None:
        """Sets fields of the run and writes the file, with secrets removed from error texts.

        Raises SupersededError if another process has taken over the run.
        """
        self._set(fields)
        write_json(self.path, self.record)

    def _set(self, fields: Record) -> None:
        if self._fence:
            self._fence.check()
        self.record |= json.loads(hide(json.dumps(fields)))

    def end(self, status: str, reason: str, *, cause: str | None = None) -> None:
        """Records that no process executes the run any more, and how it ended, or that it will resume later (pending).

        A run that did no work since it finished keeps that ending. On a full disk the record uses the space that
        `begin` has reserved.

        Args:
            cause: class of the failure.
        """
        ending: Record = {"status": status, "reason": reason, "cause": cause}
        ending["ended_at"] = now() if status in FINAL else None
        if self.status == "finished":
            ending = {"reason": ""}
        self._set(ending | {"pid": None, "pid_started": None})
        try:
            write_json(self.path, self.record)
            self._reserve.unlink(missing_ok=True)
        except DiskError:
            if not self._reserve.exists():
                raise
            with self._reserve.open("r+b") as file:  # in place, which needs no further space
                file.write(json.dumps(self.record, indent=1, ensure_ascii=False).encode())
                file.truncate()
            sync(self._reserve)
            self._reserve.replace(self.path)

    def update_stage(self, name: str, **fields: Any) -> None:
        """Sets fields of one stage and writes the file."""
        self.update(stages=self.record["stages"] | {name: self.stage(name) | fields})


def write_once(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    """Writes a document unless a whole one exists already."""
    if not read_json(path):
        write_json(path, dict(value), durable=durable)


def run_ids(home: Home) -> list[str]:
    """Returns the ids of all runs that were ever started or submitted, in alphabetical order."""
    return sorted(path.parent.name for path in home.root.glob("runs/*/run.json"))
