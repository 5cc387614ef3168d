"""Whether the process that keeps a run's state still lives: a run that says `running` and has none has crashed."""

import socket
from pathlib import Path
from typing import Any

import psutil

STATUSES = ("pending", "running", "finished", "failed", "cancelled", "crashed")


def status_of(state: dict[str, Any]) -> str:
    """The status to show for a state document: its own, or `crashed` if it says running and its process is gone."""
    status = state.get("status")
    if status not in STATUSES:
        return "pending"
    if status == "running" and not is_alive(state.get("pid"), state.get("pid_started"), state.get("host")):
        return "crashed"
    return str(status)


def is_alive(pid: Any, started: Any, host: Any = None) -> bool:
    """Whether the process of that number still is the one that had this `start_of`. A zombie does not live.

    A process of another host cannot be looked at from here and counts as alive.
    """
    if host is not None and host != socket.gethostname():
        return True
    if not isinstance(pid, int) or not isinstance(started, str):
        return False
    try:
        return start_of(pid) == started and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False


def start_of(pid: int) -> str:
    """Tells a process from every other that has had its number: `<boot>:<when it started>`. Raises psutil.Error.

    Linux counts from the boot, in clock ticks, so setting the clock changes nothing; psutil's `create_time` there is
    that count added to a boot time which moves with the clock. Elsewhere the kernel keeps the time it was started at.
    """
    if not (boot := _boot()):
        return f"clock:{psutil.Process(pid).create_time()}"
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except PermissionError:
        raise psutil.AccessDenied(pid) from None
    except OSError:
        raise psutil.NoSuchProcess(pid) from None
    # The name, in parentheses, may hold anything; the state after it is field 3, the start field 22: proc_pid_stat(5).
    return f"{boot}:{status.rpartition(')')[2].split()[22 - 3]}"


def began_with(pid: int, leader: str) -> bool:
    """Whether a process started when or after another one did, whose `start_of` is given. Raises psutil.Error."""
    (boot, begun), (leaders_boot, leaders_start) = (text.split(":") for text in (start_of(pid), leader))
    return boot == leaders_boot and float(begun) >= float(leaders_start)


def _boot() -> str:
    """Which boot of the machine this is; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
