"""What a run's directory says of it: run.json (identity, written once) and state.json (what goes on, replaced whole).

Only the process that holds the run's lock writes state.json; anyone may read it at any moment and finds it whole.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pipelines.home import Home
from rpg.files import read_json, write_json

Status = Literal["pending", "running", "finished", "failed", "cancelled"]
Record = dict[str, Any]


class RunState:
    """A run's state.json, written through at every change."""

    def __init__(self, home: Home, run_id: str) -> None:
        self.path = home.run(run_id) / "state.json"
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
        """As written; a run whose process died while `running` has crashed."""
        status: Status = self.record["status"]
        return status

    def stage(self, name: str) -> Record:
        """What is recorded of a stage; empty where nothing is."""
        found: Record = self.record["stages"].get(name, {})
        return found

    def update(self, **fields: Any) -> None:
        """Sets fields of the run and writes the file."""
        self.record |= fields
        self.save()

    def update_stage(self, name: str, **fields: Any) -> None:
        """Sets fields of one stage and writes the file."""
        self.record["stages"] = self.record["stages"] | {name: self.stage(name) | fields}
        self.save()

    def save(self) -> None:
        """Replaces the file."""
        write_json(self.path, self.record)


def write_once(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a file that never changes afterwards."""
    if not path.exists():
        write_json(path, dict(value))


def run_ids(home: Home) -> list[str]:
    """All runs that have a record, by name."""
    return sorted(path.parent.name for path in home.root.glob("runs/*/run.json"))
