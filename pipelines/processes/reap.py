"""Processes by identity (pid and start time: pids are used again), their end, and the orphans of killed commands."""

import contextlib
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from pipelines.home import Home
from pipelines.state import read_json, write_json
from storage.liveness import began_with, is_alive, start_of


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process that a later command can recognise."""

    pid: int
    pgid: int
    """Its process group; the group is ended with it."""
    started: str
    """Tells it from others of that pid: `storage.liveness.start_of`."""
    stage: str = ""
    """What it does: a stage's name, or server, worker."""

    @classmethod
    def of(cls, pid: int, stage: str = "") -> "ProcessRecord":
        """The record of a process that lives now."""
        return cls(pid, os.getpgid(pid), start_of(pid), stage)

    @classmethod
    def read(cls, path: Path) -> "ProcessRecord | None":
        """What a process.json says; None where there is none or it is not whole."""
        return cls.parse(read_json(path))

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> "ProcessRecord | None":
        """From plain data; None where a field lacks."""
        try:
            return cls(int(fields["pid"]), int(fields["pgid"]), str(fields["started"]), fields.get("stage", ""))
        except (KeyError, TypeError, ValueError):
            return None

    def write(self, path: Path) -> None:
        """Puts it where the next command looks."""
        write_json(path, asdict(self))


def group_members(record: ProcessRecord) -> list[psutil.Process]:
    """The living processes of its group and all its descendants. Empty where the pid is someone else's now."""
    found: dict[int, psutil.Process] = {}
    leader_lives = is_alive(record.pid, record.started)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            # A group outlives its leader; a group of that number that began before the leader is another one.
            ours = os.getpgid(process.pid) == record.pgid and began_with(process.pid, record.started)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process
    if leader_lives:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(record.pid).children(recursive=True):
                found[process.pid] = process
    found.pop(os.getpid(), None)
    return list(found.values())


def end(record: ProcessRecord, grace: float = 3.0) -> bool:
    """Ends a process and its group: SIGTERM, `grace` seconds, SIGKILL. Whether anything lived."""
    members = group_members(record)
    if not members:
        return False
    _send(members, signal.SIGTERM)
    _, left = psutil.wait_procs(members, timeout=grace)
    _send([*left, *group_members(record)], signal.SIGKILL)
    psutil.wait_procs(left, timeout=2.0)
    return True


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def reap(home: Home) -> list[ProcessRecord]:
    """Ends what killed commands left running: stage processes without their flow, API servers without their call."""
    ended = []
    for path in sorted(home.root.glob("runs/*/process.json")):
        state = read_json(path.with_name("state.json"))
        if is_alive(state.get("pid"), state.get("pid_started"), state.get("host")):
            continue
        ended += _reap_one(path)
    for path in sorted(home.prefect.glob("embedded-*.json")):
        fields = read_json(path)
        if not is_alive(fields.get("parent"), fields.get("parent_started")):
            ended += _reap_one(path)
    return ended


def _reap_one(path: Path) -> list[ProcessRecord]:
    record = ProcessRecord.read(path)
    lived = record is not None and end(record, grace=1.0)
    path.unlink(missing_ok=True)
    return [record] if record is not None and lived else []
