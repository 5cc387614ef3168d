"""A process that runs a scorer. The scorer may raise, hang, crash or exhaust the memory. rpg.rewards.pool starts the
process.

It speaks JSON lines. Input: the reward, then one {"problem": {...}, "response": "..."} per line. Output: an empty
object once it is ready, then the fields of one Score per line.

If a response may be run as code, a child process scores it and ends with it. Otherwise changes that the response makes
in its process would affect the scores of all later responses.
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
"""Largest number of bytes of standard error that are kept."""
_PR_SET_DUMPABLE = 4


class _OverTimeError(BaseException):
    """Signal that the time limit was reached. It is not an Exception, so that a scorer's own `except Exception` does
    not swallow it."""


def main() -> None:
    """Answers requests until its input ends.

    The first line of the input is JSON: [the reward's class as `module:class`, so that no installed package need be
    searched for; its fields as JSON; whether a response to some problems may be run, so that this process is
    sandboxed].
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a scorer prints must not mix with the verdicts
    signal.signal(signal.SIGALRM, _over_time)
    # Slurm sends the SIGTERM that asks a trainer to save its state to all processes on a machine.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reward_class, options, runs_code = json.loads(sys.stdin.readline())
    module, _, name = reward_class.partition(":")
    reward: Reward = getattr(importlib.import_module(module), name).model_validate_json(options)
    reward.prepare()
    if runs_code:
        gc.freeze()  # collections in a child would copy the library's pages
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # so that no child may write into this process's memory
    _answer(answers, b"{}")
    for line in sys.stdin:
        request = _read(line)
        alone = runs_code and _may_run(reward, request.problem)
        _answer(answers, _in_child(reward, request, answers) if alone else _judged(reward, request))
        _forget_noise()


def _answer(answers: IO[bytes], verdict: bytes) -> None:
    """Sends a verdict as exactly one line, whatever text a response has put into it."""
    answers.write(verdict.replace(b"\n", b" ") + b"\n")
    answers.flush()


class _Request(NamedTuple):
    """A response to be scored, with its problem."""

    problem: Problem
    response: str


def _read(line: str) -> _Request:
    """Returns the request in a JSON line from the pool."""
    request = json.loads(line)
    fields = request["problem"]
    fields |= {"metadata": metadata.load(fields["metadata"]), "shown": tuple(fields["shown"])}
    return _Request(Problem(**fields), request["response"])


def _may_run(reward: Reward, problem: Problem) -> bool:
    """Returns whether a response to the problem may be run as code. True if unknown."""
    try:
        return any(part.runs(problem) for part in reward.parts())
    except Exception:
        return True


def _judged(reward: Reward, request: _Request) -> bytes:
    """Returns the verdict on a request, as JSON."""
    return json.dumps(dataclasses.asdict(_in_time(reward, *request))).encode()


def _in_child(reward: Reward, request: _Request, answers: IO[bytes]) -> bytes:
    """Returns the verdict of a new child process once that has ended. If the child dies, this process ends in the same
    way."""
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
    """Scores a request in the child and writes the verdict. Returns the exit code.

    Args:
        others: descriptors of the serving process, which are closed: with them one response could answer for another.
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
    """Returns the verdict, or a failed score if there was none in time. If C code blocks the signal, the pool kills the
    process."""
    try:
        signal.setitimer(signal.ITIMER_REAL, reward.timeout_seconds)
        try:
            return verdict(reward, problem, response)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except SandboxError as error:
        return Score.failed(str(error), away=True)  # the pool retries it, and reports it if most fail
    except _OverTimeError:
        return Score.failed(f"no verdict after {reward.timeout_seconds:g} s")


def _forget_noise() -> None:
    """Empties the scorer's log once it is long, because files have a size limit and the process may run for days."""
    if os.fstat(2).st_size > _MOST_NOISE:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def _over_time(_signum: int, _frame: FrameType | None) -> None:
    raise _OverTimeError


if __name__ == "__main__":
    main()
