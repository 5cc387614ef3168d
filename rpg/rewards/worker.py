"""The process in which a scorer runs that may raise, hang, crash or eat the memory. Started by rpg.rewards.pool.

Speaks JSON lines: {"problem": {...}, "response": "..."} in, a Score's fields out; an empty object once it is ready.
"""

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from rpg.data import metadata
from rpg.processes.parent import die_with_parent
from rpg.rewards.score import Score
from rpg.types import Problem

_MEMORY_BYTES = 8 << 30
"""Address space of a worker: what an answer such as 10^10^10 may ask for before it is a MemoryError."""


class _OverTimeError(BaseException):
    """Not an Exception, so that a scorer's own `except Exception` does not swallow it."""


def main(scorer: str, timeout_seconds: float, parent: int) -> None:
    """Serves until its input ends."""
    die_with_parent(parent)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a scorer prints must not get between the answers
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, hard))
    signal.signal(signal.SIGALRM, _over_time)
    # Slurm sends the SIGTERM that asks a trainer to save its state to all that runs on a machine.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    module, _, name = scorer.partition(":")
    function = getattr(importlib.import_module(module), name)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        problem = Problem(**{**request["problem"], "metadata": metadata.load(request["problem"]["metadata"])})
        verdict = _contained(function, problem, request["response"], timeout_seconds)
        fields = {name: getattr(verdict, name) for name in ("value", "correct", "extracted", "error")}
        print(json.dumps(fields), file=answers, flush=True)


def _contained(
    function: Callable[[Problem, str], Any], problem: Problem, response: str, timeout_seconds: float
) -> Score:
    """The scorer's verdict, or why there is none. A scorer that C code keeps from the signal is the pool's to kill."""
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_seconds)
        try:
            verdict = function(problem, response)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _OverTimeError:
        return Score.failed(f"no verdict after {timeout_seconds:g} s")
    except Exception as error:
        return Score.failed(f"{type(error).__name__}: {error}"[:500])
    return verdict if isinstance(verdict, Score) else Score.failed(f"the scorer returned {verdict!r}"[:500])


def _over_time(_signum: int, _frame: FrameType | None) -> None:
    raise _OverTimeError


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
