"""Scoring of programs by their tests, which run in the sandbox."""

import atexit
import json
import re
import time
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from math import isclose, isfinite
from typing import Any, ClassVar, Literal

from pydantic import Field

from rpg.rewards.asserts import asserted
from rpg.rewards.score import Score
from rpg.sandbox import Limits, Program, Sandbox
from rpg.sandbox.room import has_compiler
from rpg.types import Problem
from specs.errors import Issue
from specs.schema.base import execution
from specs.schema.data import Source
from specs.schema.reward import Reward

_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_PRELUDE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from typing import *; from collections import *; from functools import *; from itertools import *
sys.setrecursionlimit(50_000)
"""
"""Imports and names that the sets' own graders provide for a solution."""
_CALL = """
import io, json, sys
request = json.loads(sys.stdin.read())
answers, sys.stdout, sys.stdin = sys.stdout, io.StringIO(), io.StringIO()
names = {"__name__": "solution"}
exec(compile(request["solution"], "<solution>", "exec"), names)
owner = names.get("Solution")
function = names.get(request["function"]) or getattr(owner() if owner else None, request["function"])
value = function(*request["arguments"])
answers.write(json.dumps({"value": value}))
"""
"""Code that calls a function of the solution. Its value is compared outside the sandbox, so nothing inside the sandbox
knows the expected value."""
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
"""Relative and absolute tolerance of numbers in graders that do not set their own: numpy's defaults."""
_LONGEST_NUMBER = 4300
"""Longest number, in characters, that is read if it is not written exactly as expected. Python does not read longer
integers."""


class Code(Reward):
    """Runs the program of a response on the tests of its problem: 1 if all pass, else 0, or the share of passed tests.
    Needs bubblewrap, and sources with `tests`."""

    largest: ClassVar[float] = 1.0
    sandboxed: ClassVar[bool] = True
    libraries: ClassVar[tuple[str, ...]] = ("python",)

    language: Literal["python", "c++"] = "python"
    """Language of the programs. c++ needs g++, and tests on standard input and output."""
    credit: Literal["all", "share"] = "all"
    """Score of a program. all: 1 if all tests pass, else 0. share: the share of passed tests."""
    tests: Literal["all", "hidden", "shown"] = "all"
    """Tests to run. If a set does not mark the tests that its problem shows, all count as hidden."""
    max_tests: int = Field(0, ge=0)
    """Number of a problem's tests to run, from the first on. 0 runs all."""
    seconds_per_test: float = Field(6.0, gt=0)
    """Wall time of a test in seconds. A test that takes longer fails."""
    memory_mb: int = Field(1024, ge=64)
    """Address space of a program, MiB."""
    extract: Literal["fenced", "whole"] = "fenced"
    """Part of the response that is the program: its last fenced block, or the whole response."""
    frame: str = Field("{code}", pattern=r"\{code\}")
    """Text to run, with the program in place of {code}. For short responses: "def f(x): return {code}"."""
    timeout_seconds: float = execution(120.0, gt=0)
    """Seconds after which a response's tests that have not started count as failed."""

    def refuses(self, source: Source) -> Issue | None:
        """See Reward."""
        if source.source in ("reasoning_gym", "suite") or getattr(source, "tests", "") == "none":
            return Issue(
                "reward.type code needs tests, and the source has none",
                given=source.source,
                hint="`tests` of a source jsonl, parquet or hub says of which form they are: `tests: taco`",
            )
        return None

    def objects_to(self, problem: Problem) -> Issue | None:
        """See Reward."""
        tests: dict[str, Any] = problem.metadata.get("tests") or {}
        if not self._chosen(tests):
            reason = f"has no tests for reward.tests: {self.tests}"
        elif self.language != "python" and tests["kind"] != "stdin":
            reason = f"has tests for Python alone, and reward.language is {self.language}"
        else:
            return None
        hint = "`tests` of the source says of which form they are"
        return Issue(f"this problem {reason}", given=problem.prompt[:80], hint=hint)

    def lacks(self) -> Issue | None:
        """See Reward."""
        if has_compiler(self.language):
            return None
        return Issue(
            "there is no compiler for the reward's language on this machine",
            path=("reward", "language"),
            given=self.language,
            hint="install g++ (apt install g++, dnf install gcc-c++)",
        )

    def score(self, problem: Problem, response: str) -> Score:
        """See Reward. The extracted answer is the program.

        Raises:
            SandboxError: the sandbox itself failed. Faults of a program are recorded in the score.
        """
        tests: dict[str, Any] = problem.metadata.get("tests") or {}
        chosen = self._chosen(tests)
        if not chosen:
            raise ValueError(f"problem {problem.problem_id} has no tests for reward.tests: {self.tests}")
        if self.language != "python" and tests["kind"] != "stdin":
            raise ValueError(f"problem {problem.problem_id} has tests for Python alone")
        code = self._extracted(response)
        if code is None:
            return Score.of(0.0, None)
        passed = 0
        until = time.monotonic() + self.timeout_seconds
        for outcome in self._outcomes(tests, chosen, self.frame.replace("{code}", code)):
            passed += outcome
            if time.monotonic() > until or (self.credit == "all" and not outcome):
                break
        share = passed / len(chosen)
        return Score.of(share if self.credit == "share" else float(share == 1.0), code)

    def _chosen(self, tests: dict[str, Any]) -> Sequence[Any]:
        kinds = ("shown", "hidden") if self.tests == "all" else (self.tests,)
        chosen = [test for kind in kinds for test in tests.get(kind, ())]
        return chosen[: self.max_tests or None]

    def _extracted(self, response: str) -> str | None:
        if self.extract == "whole":
            return response.strip() or None
        blocks = _FENCED.findall(response)
        return blocks[-1] if blocks else None

    def _outcomes(self, tests: dict[str, Any], chosen: Sequence[Any], code: str) -> Iterator[bool]:
        """Yields, for each test, whether it passed."""
        sandbox = _sandbox(self.seconds_per_test, self.memory_mb)
        if tests["kind"] == "assert":
            yield from asserted(sandbox, tests, chosen, code)
            return
        # An import from __future__ must come before everything else.
        prelude = "" if self.language != "python" or "__future__" in code else _PRELUDE
        for given, expected in chosen:
            if tests["kind"] == "call":
                yield _called(sandbox, tests, prelude + code, given, expected)
            else:
                outcome = sandbox.run(Program(prelude + code, given, language=self.language))
                yield outcome.fine and same_output(outcome.stdout, expected, close=tests["grader"] == "apps")


@lru_cache(maxsize=8)
def _sandbox(seconds: float, memory_mb: int) -> Sandbox:
    """Returns the process's sandbox for programs with these limits. It stays warm from one scorer to the next."""
    limits = Limits(
        seconds=seconds, memory_bytes=memory_mb << 20, processes=16, file_bytes=16 << 20, output_bytes=16 << 20
    )
    sandbox = Sandbox(limits)
    atexit.register(sandbox.close)
    return sandbox


def _called(sandbox: Sandbox, tests: dict[str, Any], solution: str, arguments: Any, expected: Any) -> bool:
    request = {"solution": solution, "function": tests["function"], "arguments": arguments}
    outcome = sandbox.run(Program(_CALL, json.dumps(request)))
    if not outcome.fine or not _fits(outcome.stdout, {"value": expected}):
        return False
    try:
        value = json.loads(outcome.stdout)["value"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return same_result(value, expected) if tests["grader"] == "apps" else bool(value == expected)


def _fits(text: str, expected: Any) -> bool:
    """Returns whether a JSON text has no more parts than the expected value. It then takes no longer to read."""
    wanted = json.dumps(expected)
    return all(text.count(mark) <= wanted.count(mark) for mark in '[{",')


def same_output(output: str, expected: str, *, close: bool) -> bool:
    """Returns whether a program printed the expected output.

    Compares line by line, as LiveCodeBench's grader does: white space around lines is ignored, and each line must be
    the same text or the same decimal numbers. With `close`, as in the graders of APPS and TACO, numbers within a
    tolerance are equal.

    Example:
        >>> same_output("1 2.50 \\n", "1 2.5", close=False), same_output("0.333333333", "0.3333333", close=True)
        (True, True)
    """
    wanted = expected.strip().split("\n")
    got = output.strip().split("\n", len(wanted))  # at most one part more than a right output has
    return len(got) == len(wanted) and all(
        _same_line(one.strip(), other.strip(), close=close) for one, other in zip(got, wanted, strict=True)
    )


def _same_line(got: str, wanted: str, *, close: bool) -> bool:
    if got == wanted:
        return True
    words = wanted.split()
    return _same_numbers(got.split(None, len(words)), words, close=close)


def _same_numbers(got: list[str], wanted: list[str], *, close: bool) -> bool:
    if len(got) != len(wanted):
        return False
    if any(one != other and len(one) > _LONGEST_NUMBER for one, other in zip(got, wanted, strict=True)):
        return False
    if close:
        return all(one == other or _close(one, other) for one, other in zip(got, wanted, strict=True))
    try:
        return [Decimal(word) for word in got] == [Decimal(word) for word in wanted]
    except InvalidOperation:
        return False


def _close(got: Any, wanted: Any) -> bool:
    try:
        one, other = float(got), float(wanted)
    except (TypeError, ValueError, OverflowError):
        return False
    return isfinite(one) and isclose(one, other, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def same_result(value: Any, expected: Any) -> bool:
    """Returns whether a call returned the expected value, which APPS and TACO may wrap in a list of one.

    Their own graders compare with the first of any list, so a program would pass with the first part of its answer.
    """
    if same_value(value, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and same_value(value, expected[0])


def same_value(value: Any, expected: Any) -> bool:
    """Returns whether two JSON values are equal. Numbers that are not whole need only be close."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, float) or isinstance(expected, float):
        return value == expected or (not isinstance(value, (str, list, dict)) and _close(value, expected))
    return bool(value == expected)
