"""A process of ours does not outlive the one that started it."""

import subprocess
import sys
import time
from pathlib import Path

import psutil

CHILD = (
    "import time; from specs.machine.parent import die_with_parent; "
    "die_with_parent({}); print('alive', flush=True); time.sleep(60)"
)


def test_the_child_dies_with_its_killed_parent() -> None:
    parent_code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {CHILD.format('')!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert ended(child)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    # No process has this id as its parent.
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(2**22 + 1)], capture_output=True, timeout=20, check=False
    )
    assert (child.returncode, child.stdout) == (-9, b"")


def test_a_child_lives_as_long_as_its_parent(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format("").replace("time.sleep(60)", "time.sleep(0.2)")],
        capture_output=True,
        timeout=20,
        check=True,
        cwd=tmp_path,
    )
    assert child.stdout == b"alive\n"


def ended(process: psutil.Process) -> bool:
    for _ in range(50):
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False
