"""A process is identified, whatever the clock does and whichever process gets its number next."""

import os
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from specs.machine import liveness
from specs.machine.liveness import began_with, is_alive, start_of

on_linux = pytest.mark.skipif(not liveness._boot(), reason="the system does not count from its boot")


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@on_linux
@pytest.mark.parametrize("seconds", [-86400.0, -1.5, 1.5, 3600.0])
def test_setting_the_clock_does_not_make_a_process_another_one(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    me, started = os.getpid(), start_of(os.getpid())
    true = psutil.Process.create_time
    # What psutil says once the clock was set: it adds the kernel's count to a boot time that moved with the clock.
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: true(process) + seconds)
    assert is_alive(me, started)
    assert began_with(me, started)


@on_linux
def test_after_a_boot_nobody_is_who_had_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    started = start_of(os.getpid())
    monkeypatch.setattr(liveness, "_boot", lambda: "another")
    assert not is_alive(os.getpid(), started)
    assert not began_with(os.getpid(), started)


@pytest.mark.parametrize("boots", [True, False])
def test_a_process_is_told_from_its_parent_and_from_none(
    monkeypatch: pytest.MonkeyPatch, sleeper: "subprocess.Popen[bytes]", boots: bool
) -> None:
    if not boots:
        monkeypatch.setattr(liveness, "_boot", lambda: "")
    started = start_of(sleeper.pid)
    assert is_alive(sleeper.pid, started)
    assert not is_alive(os.getpid(), started)
    assert began_with(sleeper.pid, start_of(os.getpid()))
    assert not is_alive(sleeper.pid, None)
    assert not is_alive(None, started)
    sleeper.kill()
    assert wait_until_zombie(sleeper.pid)
    assert not is_alive(sleeper.pid, started), "a zombie"
    sleeper.wait()
    assert not is_alive(sleeper.pid, started)


def wait_until_zombie(pid: int) -> bool:
    """It stays one until somebody waits for it."""
    return any(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for _ in range(10**6))
