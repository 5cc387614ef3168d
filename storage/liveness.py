"""Whether the process that keeps a run's state still lives: a run that says `running` and has none has crashed."""

import socket
from typing import Any

import psutil

STATUSES = ("pending", "running", "finished", "failed", "cancelled", "crashed")
START_TOLERANCE_SECONDS = 2.0
"""A process's start time is derived from the machine's clock, which may be corrected while it runs."""


def status_of(state: dict[str, Any]) -> str:
    """The status to show for a state document: its own, or `crashed` if it says running and its process is gone."""
    status = state.get("status")
    if status not in STATUSES:
        return "pending"
    if status == "running" and not is_alive(state.get("pid"), state.get("pid_started"), state.get("host")):
        return "crashed"
    return str(status)


def is_alive(pid: Any, started: Any, host: Any = None) -> bool:
    """Whether the process of that number still is the one that started then (seconds since the epoch).

    A process of another host cannot be looked at from here and counts as alive.
    """
    if host is not None and host != socket.gethostname():
        return True
    if not isinstance(pid, int):
        return False
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return not isinstance(started, (int, float)) or abs(process.create_time() - started) <= START_TOLERANCE_SECONDS
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False
