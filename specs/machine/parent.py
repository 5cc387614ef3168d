"""Preparation of our child processes: they end with their parent, share the cores with their neighbours, and keep
compiled code in the user's own cache."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from specs.machine.own_cache import library_variables

RUNS_AT_ONCE = "RPG_RUNS_AT_ONCE"
"""Environment variable: number of runs that a command executes at the same time on this machine, whose cores they
share."""
_PR_SET_PDEATHSIG = 1
# Loaded with the module: the dynamic loader must not run between fork and exec.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def before_torch() -> None:
    """Prepares the environment of this process and of all that it starts. Call it before torch is imported."""
    share_cores()
    os.environ.update(library_variables())


def share_cores() -> None:
    """Lets idle OpenMP threads sleep after a short spin. Call it before torch is imported.

    Measured with two threads on two cores: if another run needs the same cores, libgomp's own long spin makes a
    training step ten times as long, and the short spin makes small operations 1.4 times as long as immediate sleep
    does. If no other run does, immediate sleep makes a step a quarter longer. A policy or spin count that is already
    set stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def own_threads(threads: int, processes: int, environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of threads for one of a run's processes on this machine: the number in the spec or in
    OMP_NUM_THREADS, else the process's share of the cores.

    Args:
        threads: the spec's resources.threads.
        processes: number of the run's processes here.
        environment: environment of the process.
    """
    sharing = processes * int(environment.get(RUNS_AT_ONCE, "1"))
    said = threads or int(environment.get("OMP_NUM_THREADS", "0"))
    return said or max(1, len(os.sched_getaffinity(0)) // sharing)


def die_with_parent(parent: int | None = None, *, number: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to kill this process when the thread that started it ends; kills it at once if that has already
    happened.

    The signal reaches no grandchildren, and is sent when the starting thread, not the process, ends: start children
    from the main thread. On other systems than Linux this does nothing. Our processes call it first; for other programs
    it is the `preexec_fn`: `partial(die_with_parent, os.getpid())`.

    Args:
        parent: id of the process that started this one, if known. Otherwise a process whose parent is init counts as
            orphaned.
        number: the signal.
    """
    if _LIBC is None:
        return
    before = os.getppid()
    if _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # If the parent ended before the request, no signal will come.
    expected = parent if parent is not None else before
    if os.getppid() != expected or (parent is None and before == 1 and not _init_is_ours()):
        os.kill(os.getpid(), signal.SIGKILL)


def _init_is_ours() -> bool:
    """Returns whether process 1 is an ordinary parent. In a container, the command itself may be process 1."""
    try:
        return Path("/proc/1/comm").read_text(encoding="utf-8").startswith(("python", "rpg"))
    except OSError:
        return False
