"""A process of ours and the one that started it: it ends when that one is gone, and leaves cores to its neighbours; the
code that its libraries compile lies in the user's own cache."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from specs.machine.own_cache import library_variables

RUNS_AT_ONCE = "RPG_RUNS_AT_ONCE"
"""Environment variable: how many runs a command executes on this machine at the same time; they share its cores."""
_PR_SET_PDEATHSIG = 1
# Loaded with the module: the dynamic loader must not be entered between fork and exec.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def before_torch() -> None:
    """Prepares the environment of this process and of all that it starts; call it before torch is imported."""
    share_cores()
    os.environ.update(library_variables())


def share_cores() -> None:
    """Lets idle OpenMP threads sleep after a short spin; call it before torch is imported.

    Measured with two threads on two cores: where another run wants the same cores, libgomp's own long spin makes a
    training step ten times as long, and this one small operations 1.4 times as long as sleeping at once does. Where
    no other run does, sleeping at once makes a step a quarter longer. A policy or spin count that is set already stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def own_threads(threads: int, processes: int, environment: Mapping[str, str] = os.environ) -> int:
    """Threads that one of several processes of a run computes with on this machine: as many as the spec or
    OMP_NUM_THREADS says, else its share of the cores.

    Args:
        threads: the spec's resources.threads.
        processes: how many of the run there are here.
        environment: of the process.
    """
    sharing = processes * int(environment.get(RUNS_AT_ONCE, "1"))
    said = threads or int(environment.get("OMP_NUM_THREADS", "0"))
    return said or max(1, len(os.sched_getaffinity(0)) // sharing)


def die_with_parent(parent: int | None = None, *, number: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to kill this process when the thread that started it ends; kills it now if that has happened already.

    The signal reaches no grandchildren, and fires when the starting thread, not process, ends: start
    children from the main thread. Elsewhere than on Linux this does nothing. A process of ours calls it first thing;
    for a program that is not ours it is the `preexec_fn`: `partial(die_with_parent, os.getpid())`.

    Args:
        parent: id of the process that started this one, if known. Else one adopted by init counts as orphaned.
        number: the signal.
    """
    if _LIBC is None:
        return
    before = os.getppid()
    if _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # A parent that ended before the request will send no signal.
    expected = parent if parent is not None else before
    if os.getppid() != expected or (parent is None and before == 1 and not _init_is_ours()):
        os.kill(os.getpid(), signal.SIGKILL)


def _init_is_ours() -> bool:
    """In a container the command itself may be process 1, an ordinary parent."""
    try:
        return Path("/proc/1/comm").read_text(encoding="utf-8").startswith(("python", "rpg"))
    except OSError:
        return False
