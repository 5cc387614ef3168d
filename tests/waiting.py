"""Waiting for a condition of a test, and not for a time in which it should have come."""

import time
from collections.abc import Callable
from typing import Any

import psutil


def wait_for(condition: Callable[[], Any], *, timeout: float = 120, what: str = "") -> Any:
    """The condition's first true value; fails when `timeout` seconds are over."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s for {what or condition}"
        time.sleep(0.02)
    return value


def is_gone(pid: int) -> bool:
    """Returns whether no process of this number runs any more; a zombie counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
