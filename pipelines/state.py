"""What a run's directory says of it: run.json (identity, written once) and state.json (what goes on, replaced whole).

Only the process that holds the run's lock writes state.json; anyone may read it at any moment and finds it whole.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pipelines.home import Home

Status = Literal["pending", "running", "finished", "failed", "cancelled"]
Record = dict[str, Any]


def write_json(path: Path, value: Any) -> None:
    """Replaces a file with `value`: written aside, synced, renamed, so that a reader never meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def read_json(path: Path) -> Record:
    """The object in a file; empty where the file is not there or not whole."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


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
