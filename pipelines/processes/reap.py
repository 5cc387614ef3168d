"""Processes of a killed command, which a later command can recognise and end.

Pid and start time identify a process, since pids are reused. A record counts only in the directory in which it was
written: a record that was copied with its home describes the other home's process.
"""

import contextlib
import os
import signal
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipelines.home.home import Home
from specs.machine.files import read_json, write_json
from specs.machine.liveness import (
    began_with,
    has_holder,
    is_alive,
    is_place,
    is_visible,
    pid_namespace_here,
    place_of,
    start_of,
)
from specs.machine.scratch import sweep


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process that a later command can recognise."""

    pid: int
    pgid: int
    """The process group, which is ended with the process."""
    started: str
    """Start of the process, which distinguishes it from other processes with that pid:
    `specs.machine.liveness.start_of`."""
    stage: str = ""
    """Purpose of the process: a stage's name, or server, worker."""
    pid_namespace: str = ""
    """Namespace of the pids: `specs.machine.liveness.pid_namespace_here`; empty if the system has none."""
    place: str = field(default="", compare=False)
    """The directory of the record's file: `specs.machine.liveness.place_of`; empty if none was recorded."""

    @classmethod
    def of(cls, pid: int, stage: str = "", within: Path | None = None) -> "ProcessRecord":
        """Returns the record of a process that is alive. `within`: the directory of the record's future file."""
        place = place_of(within) if within else ""
        return cls(pid, os.getpgid(pid), start_of(pid), stage, pid_namespace_here(), place)

    @classmethod
    def read(cls, path: Path) -> "ProcessRecord | None":
        """Returns the record in a process.json; None if the file is missing or incomplete, or was copied from
        elsewhere."""
        return cls.parse(read_json(path), path.parent)

    @classmethod
    def parse(cls, fields: dict[str, Any], within: Path) -> "ProcessRecord | None":
        """Returns the record in plain data; None if a field is missing, or the record was copied from elsewhere.

        Args:
            within: the directory of the record's file.
        """
        try:
            numbers, place = (int(fields["pid"]), int(fields["pgid"])), str(fields.get("place", ""))
            started, stage, namespace = str(fields["started"]), fields.get("stage", ""), fields.get("pid_namespace", "")
        except (KeyError, TypeError, ValueError):
            return None
        return cls(*numbers, started, stage, namespace, place) if is_place(place, within) else None

    def write(self, path: Path) -> None:
        """Writes a process.json for later commands."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self) | {"place": place_of(path.parent)})


def group_members(record: ProcessRecord) -> list[psutil.Process]:
    """Returns the living processes of the record's group, and all their descendants. Empty if another process now
    has the pid."""
    members: dict[int, psutil.Process] = {}
    if not is_visible(record.pid_namespace):
        return []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            # A group outlives its leader. If the group's processes began before the leader, the number now belongs to
            # another group.
            ours = os.getpgid(process.pid) == record.pgid and began_with(process.pid, record.started)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                members[process.pid] = process
    if is_alive(record.pid, record.started):
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(record.pid).children(recursive=True):
                members[process.pid] = process
    members.pop(os.getpid(), None)
    return list(members.values())


def end(record: ProcessRecord, grace: float = 3.0) -> bool:
    """Ends a process and its group: SIGTERM, `grace` seconds, SIGKILL. Returns whether any of them was alive."""
    members = group_members(record)
    if not members:
        return False
    _send(members, signal.SIGTERM)
    _, alive = psutil.wait_procs(members, timeout=grace)
    _send([*alive, *group_members(record)], signal.SIGKILL)
    psutil.wait_procs(alive, timeout=2.0)
    return True


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def reap(home: Home) -> list[ProcessRecord]:
    """Ends processes of killed commands: stage processes whose flow is gone, API servers whose command is gone. Removes
    their temporary directories.

    A flow that was only stopped (Ctrl-Z) keeps its stage until another process takes the run from it.

    Returns the processes that were still alive.
    """
    ended = []
    sweep(home.root)
    left = [*home.root.glob("runs/*/process.json"), *home.root.glob("runs/*/concurrent/*/process.json")]
    for run in sorted({home.root / "runs" / path.relative_to(home.root).parts[1] for path in left}):
        if not has_holder(run, read_json(run / "state.json")):
            ended += end_left_process(run)
    for path in sorted(home.prefect.glob("embedded-*.json")):
        fields = read_json(path)
        is_copied = ProcessRecord.read(path) is None
        if is_copied or not is_alive(fields.get("parent"), fields.get("parent_started")):
            ended += _reap_one(path)
    return ended


def end_left_process(run_directory: Path) -> list[ProcessRecord]:
    """Ends the stages' processes that a run's last flow has left running on this host. Returns those that were alive.

    Only the flow's own host ends the processes that the flow has left.
    """
    host = read_json(run_directory / "state.json").get("host")
    if host not in (None, socket.gethostname()):
        return []
    records = [run_directory / "process.json", *run_directory.glob("concurrent/*/process.json")]
    return [ended for path in records for ended in _reap_one(path)]


def _reap_one(path: Path) -> list[ProcessRecord]:
    record = ProcessRecord.read(path)
    if record is not None and not is_visible(record.pid_namespace):
        return []
    was_alive = record is not None and end(record, grace=1.0)
    path.unlink(missing_ok=True)
    return [record] if record is not None and was_alive else []
