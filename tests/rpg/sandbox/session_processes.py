"""Sessions whose first call leaves busy processes, and what these do between calls, as JSON. Run by
test_session_processes.py."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from rpg.sandbox import Limits, Sandbox, room, stopping

WINDOW = 0.5
"""Seconds of the measurement."""
BEGIN = """
import ctypes, fcntl, mmap, os, signal, subprocess, sys, threading, time
counts = mmap.mmap(-1, 4096)  # a counter for each process
def burn(place=0):
    while True:
        n = int.from_bytes(counts[8 * place:8 * place + 8], "little")
        counts[8 * place:8 * place + 8] = (n + 1).to_bytes(8, "little")
def begun(places=1):
    while not all(counts[8 * place] for place in range(places)):
        time.sleep(0.001)
def apart(work):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            work()
        os._exit(0)
"""
LEAVES = {
    "a grandchild in a session of its own": "apart(burn)\nbegun()",
    "a thread": "threading.Thread(target=burn, daemon=True).start()\nbegun()",
    "threads of a grandchild": (
        "def several():\n for place in (1, 2): threading.Thread(target=burn, args=(place,)).start()\n burn()\n"
        "apart(several)\nbegun(3)"
    ),
    "processes that fork": (
        "def forks():\n"
        " while True:\n"
        "  counts[0:1] = b'x'\n"
        "  if os.fork() == 0:\n"
        "   if os.fork(): os._exit(0)\n"
        "  else: os.wait()\n"
        "apart(forks)\nbegun()"
    ),
    "processes that wake each other": (
        "def wakes(place):\n"
        " signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        " while True:\n"
        "  counts[8 * place:8 * place + 1] = b'x'\n"
        "  try: os.kill(-1, signal.SIGCONT)\n"
        "  except OSError: pass\n"
        "for place in range(4): apart(lambda: wakes(place))\nbegun(4)"
    ),
    "a timer that wakes": (
        "def timed():\n"
        " libc = ctypes.CDLL(None)\n"
        " event = (ctypes.c_int * 16)(0, 0, signal.SIGCONT, 0)\n"
        " for tenth in range(1, 6):\n"
        "  timer, once = ctypes.c_void_p(), (ctypes.c_long * 4)(0, 0, 0, tenth * 10**8)\n"
        "  if libc.timer_create(1, event, ctypes.byref(timer)) == 0: libc.timer_settime(timer, 0, once, None)\n"
        " burn()\n"
        "apart(timed)\nbegun()"
    ),
}
GOES_ON = """
before = bytes(counts)
until = time.monotonic() + 20
while bytes(counts) == before and time.monotonic() < until:
    time.sleep(0.001)
print(bytes(counts) != before)
"""
BURNS = """
for _ in range(2):
    if os.fork() == 0:
        while time.process_time() < 1.75: pass
        os._exit(0)
for _ in range(2): os.wait()
kept = 1
"""


def used() -> float:
    """CPU seconds of all that came of this process, of those that are there."""
    total = 0.0
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(each.cpu_times()[:4])
    return total


def numbers() -> set[int]:
    """Numbers of the processes that came of this one."""
    return {each.pid for each in psutil.Process().children(recursive=True)}


def main() -> None:
    found: dict[str, object] = {}
    with Sandbox(Limits(seconds=60.0, processes=16), at_once=1) as sandbox:
        for name, code in LEAVES.items():
            with sandbox.session() as session:
                said = session.execute(BEGIN + code)
                before, there = used(), numbers()
                time.sleep(WINDOW)
                between, new = used() - before, len(numbers() - there)
                then = session.execute(GOES_ON).stdout.strip() if "grandchild" in name or "thread" in name else ""
            found[name] = {"said": [said.ended, said.stderr], "between": between, "new": new, "then": then}
    with Sandbox(Limits(seconds=60.0, processes=16, cpu_seconds=1), at_once=1) as sandbox, sandbox.session() as session:
        outcomes = [session.execute(BEGIN + BURNS), *(session.execute("print(kept)") for _ in range(3))]
        found["burns"] = [[each.ended, each.stdout, each.stderr] for each in outcomes]
        seal = session._seal
        found["way"] = type(seal._stopper).__name__ if seal else ""
    if cgroup := stopping.Cgroup.made():
        cgroup.remove()
        found["cgroups left"] = [each.name for each in cgroup.directory.parent.glob(f"rpg-{os.getpid()}-*")]
    found["missing"] = str(room.missing() or "")
    print(json.dumps(found))


if __name__ == "__main__":
    os.chdir(Path("/"))
    main()
