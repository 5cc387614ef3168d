"""The process in which a scorer runs that may raise, hang, crash or eat the memory. Started by rpg.rewards.pool.

Speaks JSON lines: {"problem": {...}, "response": "..."} in, a Score's fields out; an empty object once it is ready.
"""

import dataclasses
import importlib
import json
import os
import signal
import sys
from types import FrameType

from rpg.data import metadata
from rpg.rewards.score import Score, verdict
from rpg.types import Problem
from specs.schema.reward import Reward

_MOST_NOISE = 1 << 18
"""Bytes of standard error that are kept."""


class _OverTimeError(BaseException):
    """Not an Exception, so that a scorer's own `except Exception` does not swallow it."""


def main(reward_class: str, options: str) -> None:
    """Serves until its input ends.

    Args:
        reward_class: `module:class`, so that no installed package need be searched for.
        options: the reward's fields, JSON.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a scorer prints must not mix with the verdicts
    signal.signal(signal.SIGALRM, _over_time)
    # Slurm sends the SIGTERM that asks a trainer to save its state to all that runs on a machine.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    module, _, name = reward_class.partition(":")
    reward: Reward = getattr(importlib.import_module(module), name).model_validate_json(options)
    reward.prepare()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        problem = Problem(**{**request["problem"], "metadata": metadata.load(request["problem"]["metadata"])})
        score = _in_time(reward, problem, request["response"])
        _forget_noise()
        print(json.dumps(dataclasses.asdict(score)), file=answers, flush=True)


def _in_time(reward: Reward, problem: Problem, response: str) -> Score:
    """The verdict, or that there was none in time. A scorer that C code keeps from the signal is the pool's to kill."""
    try:
        signal.setitimer(signal.ITIMER_REAL, reward.timeout_seconds)
        try:
            return verdict(reward, problem, response)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _OverTimeError:
        return Score.failed(f"no verdict after {reward.timeout_seconds:g} s")


def _forget_noise() -> None:
    """Empties what the scorer has written, once it is much: files have a limit, and it serves for days."""
    if os.fstat(2).st_size > _MOST_NOISE:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def _over_time(_signum: int, _frame: FrameType | None) -> None:
    raise _OverTimeError


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
