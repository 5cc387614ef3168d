"""The process in which a scorer runs that may raise, hang, crash or eat the memory. Started by rpg.rewards.pool.

Speaks JSON lines. In: the reward, then {"problem": {...}, "response": "..."} each. Out: an empty object once it is
ready, then a Score's fields each.
Where a response may be run as code, a child scores it and ends with it: what a response has changed in its process
would change the scores of all later ones.
"""

import ctypes
import dataclasses
import gc
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from types import FrameType
from typing import IO, NamedTuple

from rpg.data import metadata
from rpg.rewards.score import LONGEST_VERDICT, Score, verdict
from rpg.sandbox import SandboxError
from rpg.types import Problem
from specs.schema.reward import Reward

_MOST_NOISE = 1 << 18
"""Bytes of standard error that are kept."""
_PR_SET_DUMPABLE = 4


class _OverTimeError(BaseException):
    """Not an Exception, so that a scorer's own `except Exception` does not swallow it."""


def main() -> None:
    """Serves until its input ends.

    The first line of the input is JSON: [the reward's class as `module:class`, so that no installed package need be
    searched for; its fields as JSON; whether a response to some problems may be run, so that this process is sealed].
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a scorer prints must not mix with the verdicts
    signal.signal(signal.SIGALRM, _over_time)
    # Slurm sends the SIGTERM that asks a trainer to save its state to all that runs on a machine.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reward_class, options, runs_code = json.loads(sys.stdin.readline())
    module, _, name = reward_class.partition(":")
    reward: Reward = getattr(importlib.import_module(module), name).model_validate_json(options)
    reward.prepare()
    if runs_code:
        gc.freeze()  # a child's collections would copy the pages of what the library has made
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # so that no child may write in this process's memory
    _answer(answers, b"{}")
    for line in sys.stdin:
        request = _read(line)
        alone = runs_code and _may_run(reward, request.problem)
        _answer(answers, _in_child(reward, request, answers) if alone else _judged(reward, request))
        _forget_noise()


def _answer(answers: IO[bytes], verdict: bytes) -> None:
    """Sends one line, whatever a response has put into its verdict."""
    answers.write(verdict.replace(b"\n", b" ") + b"\n")
    answers.flush()


class _Request(NamedTuple):
    """A response to be scored, with its problem."""

    problem: Problem
    response: str


def _read(line: str) -> _Request:
    """A request, from the JSON of the pool."""
    request = json.loads(line)
    fields = request["problem"]
    fields |= {"metadata": metadata.load(fields["metadata"]), "shown": tuple(fields["shown"])}
    return _Request(Problem(**fields), request["response"])


def _may_run(reward: Reward, problem: Problem) -> bool:
    """Whether a response to the problem may be run as code; one that cannot be told may."""
    try:
        return any(part.runs(problem) for part in reward.parts())
    except Exception:
        return True


def _judged(reward: Reward, request: _Request) -> bytes:
    """The verdict on a request, JSON."""
    return json.dumps(dataclasses.asdict(_in_time(reward, *request))).encode()


def _in_child(reward: Reward, request: _Request, answers: IO[bytes]) -> bytes:
    """The verdict of a child of its own, once that has ended. As a child dies, so does this process."""
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            code = _score_alone(reward, request, tells, (told, answers.fileno()))
        os._exit(code)
    os.close(tells)
    with os.fdopen(told, "rb") as pipe:
        verdict = pipe.read(LONGEST_VERDICT + 1)
    if len(verdict) <= LONGEST_VERDICT:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code or not verdict:
            os._exit(code if code >= 0 else 128 - code)
    return verdict


def _score_alone(reward: Reward, request: _Request, tells: int, others: tuple[int, ...]) -> int:
    """Writes the verdict. Returns the exit code.

    Args:
        others: descriptors of the process that serves; with them one response could answer for another.
    """
    try:
        for descriptor in others:
            os.close(descriptor)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        with os.fdopen(tells, "wb") as pipe:
            pipe.write(_judged(reward, request))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _in_time(reward: Reward, problem: Problem, response: str) -> Score:
    """The verdict, or that there was none in time. A scorer that C code keeps from the signal is the pool's to kill."""
    try:
        signal.setitimer(signal.ITIMER_REAL, reward.timeout_seconds)
        try:
            return verdict(reward, problem, response)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except SandboxError as error:
        return Score.failed(str(error), away=True)  # the pool tries it again, and says so where most fail
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
    main()
