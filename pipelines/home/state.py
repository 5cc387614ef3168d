"""A run's documents: run.json, what the run is, written once; and state.json, how it stands, replaced at every change.

Only the process that holds the run's lease writes state.json. Anyone may read it at any moment and finds it whole.

These methods alone change the status of a run:

| method      | pending, failed, cancelled | running      | finished                           |
|-------------|----------------------------|--------------|------------------------------------|
| `submitted` | pending                    | pending      | finished, and waits for its worker |
| `begin`     | running                    | running      | finished                           |
| `work`      | running                    | running      | running: a stage is done again     |
| `end`       | the ending                 | the ending   | finished, with its own ending      |

So finished work stays finished until a stage of it is done again.
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
"""Why a run waits for its first worker, or, finished, for one that does what is left of it."""
_RESERVED_BYTES = 64 << 10
"""Room for the record of a run's end, where the disk is full by then."""
WAITING = "waiting for a worker"
"""Why a run that somebody had begun is pending: any worker of its pool goes on with it."""
Record = dict[str, Any]


class RunState:
    """A run's state.json, written through at every change."""

    def __init__(self, home: Home, run_id: str, fence: Fence | None = None) -> None:
        """`fence`: of the lease under which this process writes; None: it only reads, or the run was never begun."""
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
        """Status as it is written: that of a run whose process died still says `running`; see `runs.status_of`."""
        status: Status = self.record["status"]
        return status

    def stage(self, name: str) -> Record:
        """The record of a stage; empty where it was never begun."""
        record: Record = self.record["stages"].get(name, {})
        return record

    @property
    def waits(self) -> bool:
        """Whether a flow run of the run waits for a worker, as far as this home knows."""
        asked = self.status == "pending" or (self.status == "finished" and self.record["reason"] == SUBMITTED)
        return asked and self.record["flow_run_id"] is not None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended and no flow run of it waits: nothing more is to come."""
        return self.status in FINAL and not self.waits

    def submitted(self, flow_run_id: str, api_url: str) -> None:
        """Records that a flow run waits for a worker. Does not wait for the disk: the server has the flow run."""
        status = "finished" if self.status == "finished" else "pending"
        self.record |= {"status": status, "reason": SUBMITTED, "flow_run_id": flow_run_id, "api_url": api_url}
        write_json(self.path, self.record, durable=False)

    def begin(self, **fields: Any) -> None:
        """Records that this process executes the run from now on. One that has finished stays so until `work`."""
        with explained(self._reserve):
            self._reserve.parent.mkdir(parents=True, exist_ok=True)
            self._reserve.write_bytes(bytes(_RESERVED_BYTES))
        self.update(**(fields if self.status == "finished" else fields | self._running()))

    def work(self) -> None:
        """Records that a stage is done from now on, also of a run that had finished."""
        if self.status == "finished":
            self.update(**self._running())

    def _running(self) -> Record:
        started_at = self.record["started_at"] or now()
        return {"status": "running", "reason": "", "cause": None, "started_at": started_at, "ended_at": None}

    def update(self, **fields: Any) -> None:
        """Sets fields of the run and writes the file, without the secrets that an error's words may hold.

        Raises SupersededError where the run was taken over.
        """
        self._set(fields)
        write_json(self.path, self.record)

    def _set(self, fields: Record) -> None:
        if self._fence:
            self._fence.check()
        self.record |= json.loads(hide(json.dumps(fields)))

    def end(self, status: str, reason: str, *, cause: str | None = None) -> None:
        """Records how the run has ended, or that it is to go on later (pending), and that no process executes it.

        A run of which nothing was done since it finished keeps that ending. On a full disk the record takes the room
        that `begin` has reserved.

        Args:
            cause: of a failure, by its class.
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
            with self._reserve.open("r+b") as file:  # in place, which needs no further room
                file.write(json.dumps(self.record, indent=1, ensure_ascii=False).encode())
                file.truncate()
            sync(self._reserve)
            self._reserve.replace(self.path)

    def update_stage(self, name: str, **fields: Any) -> None:
        """Sets fields of one stage and writes the file."""
        self.update(stages=self.record["stages"] | {name: self.stage(name) | fields})


def write_once(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    """Writes a document unless a whole one is there already."""
    if not read_json(path):
        write_json(path, dict(value), durable=durable)


def run_ids(home: Home) -> list[str]:
    """Ids of all runs that were ever begun or submitted, in alphabetical order."""
    return sorted(path.parent.name for path in home.root.glob("runs/*/run.json"))
