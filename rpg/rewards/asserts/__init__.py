"""Tests of a program that are asserts. The program runs in one process of the sandbox, the tests in another.

A call of the program's function goes to the program's process, and its value comes back as plain data. So no object of
the program is ever compared, and the program can read no expected value. Tests that need more than values run in one
process with the program. `values`, `examination` and `beside` are the modules that run in the sandbox.
"""

import inspect
import json
import marshal
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from rpg.rewards.asserts import beside, examination, values
from rpg.sandbox import Outcome, Program, Sandbox, SandboxError, Session
from rpg.sandbox.room import cores

_LOADER = """
def _inside():
    import builtins, marshal, sys, types
    names = {}
    for name, code in marshal.loads(bytes.fromhex("COMPILED")):
        module = sys.modules[name] = types.ModuleType(name)
        module.__builtins__ = vars(builtins).copy()
        exec(code, vars(module))
        names |= vars(module)
    return names
_inside = _inside()
"""
_LONGEST_KEPT, _MOST_KEPT = 1 << 14, 64
"""Largest length, in characters, of values that are kept for a problem, and largest number of its kept verdicts.
Responses are often alike."""
_PATIENCE_SECONDS = 0.25
"""Longest time in seconds to wait for another thread's examiner; a new one takes a tenth of it."""
_MOST_PLANS = 256
"""Largest number of problems whose plan is kept."""


class _Problem(NamedTuple):
    """Tests that are run together."""

    sandbox: Sandbox
    setup: str
    function: str
    tests: tuple[str, ...]


class _Plan(NamedTuple):
    """How the tests of a problem are run."""

    beside: bool
    """Whether the tests need the program itself, and run in one process with it."""
    says: str
    """The calls that each test makes first, as JSON. For tests that run in the program's process: `1` if the names of
    builtins in them are Python's own. Empty if the tests fail with any program."""
    verdicts: dict[str, str]
    """Values that programs have returned -> verdicts of the tests on them."""
    rounds: bool = False
    """Whether tests of this problem have made further calls after they got the values of the first calls."""


def asserted(sandbox: Sandbox, tests: dict[str, Any], chosen: Sequence[str], code: str) -> Iterator[bool]:
    """Yields, for each test, whether the program passes it.

    Args:
        tests: see `rpg.data.test_cases.TestCases`.
        chosen: the tests to run, as statements.
        code: the program.
    """
    problem = _Problem(sandbox, f"{tests['setup']}\n", tests["function"], tuple(chosen))
    program = _completed(tests, code)
    plan = _EXAMINERS.plan(problem)
    said = "" if not plan.says else (_judged_beside if plan.beside else _judged)(problem, program, plan)
    yield from (said[number : number + 1] == "P" for number in range(len(chosen)))


def _judged(problem: _Problem, program: str, plan: _Plan) -> str:
    """Returns P (passed) or F (failed) for each test that the program reaches."""
    with problem.sandbox.session() as session:
        values = _values(session, problem, program, plan)
        if not values or values in plan.verdicts:
            return plan.verdicts.get(values, "")
        examiner = _EXAMINERS.take(problem)
        try:
            said = plan.verdicts.get(values) or examiner.ask(f"judge({values!r})")
            if ":" in said and not plan.rounds:
                plan = plan._replace(rounds=True)
                _EXAMINERS.keep(problem, plan)
                _values(session, problem, program, plan)
            elif said and ":" not in said and len(values) < _LONGEST_KEPT and len(plan.verdicts) < _MOST_KEPT:
                plan.verdicts[values] = said
            number, until = -1, 0.0
            while ":" in said:
                said, _, calls = said.partition(":")
                if len(said) != number:  # another test has the same number
                    number, until = len(said), time.monotonic() + problem.sandbox.limits.seconds
                values = _last_line(session.execute(_answering(calls))) if time.monotonic() < until else ""
                said += examiner.ask(f"go_on({values!r})")
            return said
        finally:
            _EXAMINERS.give_back(problem, examiner)


def _values(session: Session, problem: _Problem, program: str, plan: _Plan) -> str:
    """Returns the values of all tests' first calls, as JSON; empty if the program cannot make the first test's calls.

    One process makes all calls if together they take no longer than one test may. Otherwise, and if tests make further
    calls, each test gets its own time in the session, which keeps the program.
    """
    if not plan.rounds:
        given = json.dumps({"sources": [problem.setup, program], "calls": plan.says})
        outcome = problem.sandbox.run(Program(f"{_loading('values')}\n_inside['run'](globals())", given))
        if outcome.fine or "\0" not in outcome.stdout:
            return _last_line(outcome)
    alive = (
        session.execute(f"{problem.setup}\n{_loading('values')}").fine
        and _last_line(session.execute(f"{program}\n_inside['reply']('loaded')")) == "loaded"
    )
    found = []
    for number in range(len(problem.tests)):
        line = _last_line(session.execute(_answering(plan.says, number))) if alive else ""
        alive = bool(line)
        found += [line[1:-1]] if alive else []
    return f"[{', '.join(found)}]"


def _answering(calls: str, number: int = 0) -> str:
    """Returns code that makes the calls of one test and prints the values."""
    return f"_inside['answer']({calls!r}, globals(), {number})"


def _judged_beside(problem: _Problem, program: str, plan: _Plan) -> str:
    """Returns P (passed) or F (failed) for each test that the program reaches. See `_values` for the time limit of the
    tests."""
    given = [problem.setup, list(problem.tests), plan.says == "1"]
    outcome = problem.sandbox.run(
        Program(f"{_loading('beside')}\n_inside['run']()", json.dumps({"given": given, "program": program}))
    )
    if outcome.fine or "\0" not in outcome.stdout:
        return _last_line(outcome)
    said = ""
    with problem.sandbox.session() as session:
        ready = session.execute(f"{_loading('beside')}\n_tests = _inside['Beside'](*{given!r})").fine
        ready = ready and session.execute(f"_tests.start({program!r})").fine
        while ready and len(said) < len(problem.tests):
            letter = _last_line(session.execute(f"_inside['reply'](_tests.judge({len(said)}))"))
            ready, said = bool(letter), said + letter
    return said


def _completed(tests: dict[str, Any], code: str) -> str:
    """Returns the whole program. If a response has only a function's body, the problem's beginning of the function is
    put before it."""
    is_body = tests["function"] and not re.search(rf"\b{re.escape(tests['function'])}\b", code)
    return tests["setup"] + code if is_body else code


def _last_line(outcome: Outcome) -> str:
    """Returns the last line that a call printed; empty if the call failed."""
    return outcome.stdout.rstrip("\n").rpartition("\n")[2] if outcome.fine else ""


@lru_cache(maxsize=3)
def _loading(last: str) -> str:
    """Returns code that loads the module `values`, and then the module `last`, which imports it. Their names are then
    in `_inside`.

    Each module has its own copy of the builtins, which no program can replace.
    """
    modules = {"values": values, "examination": examination, "beside": beside}
    codes = [
        (f"{__name__}.{name}", compile(inspect.getsource(modules[name]), f"<{name}>", "exec", optimize=2))
        for name in dict.fromkeys(("values", last))
    ]
    return _LOADER.replace("COMPILED", marshal.dumps(codes).hex())


class _Examiner:
    """An interpreter that has the tests of a problem but no part of a program."""

    def __init__(self, problem: _Problem) -> None:
        self._session = problem.sandbox.session()
        given = (problem.setup, list(problem.tests), problem.function)
        code = f"{_loading('examination')}\n_tests = _inside['Examination'](*{given!r})\n_inside['reply'](_tests.plan)"
        beside, marked, says = _last_line(self._session.execute(code)).partition(":")
        self.plan = _Plan(bool(beside), says if marked else "", {})

    def ask(self, call: str) -> str:
        """Returns the reply of a method of `Examination`; empty if the call fails."""
        with suppress(SandboxError):
            return _last_line(self._session.execute(f"_inside['reply'](_tests.{call})"))
        return ""

    def close(self) -> None:
        """Ends the interpreter."""
        self._session.close()


class _Examiners:
    """Examiners of problems, reused for one response after another. At most one idle examiner per core is kept."""

    def __init__(self) -> None:
        self._plans: OrderedDict[_Problem, _Plan] = OrderedDict()
        self._idle: list[tuple[_Problem, _Examiner]] = []
        self._lent = Counter[_Problem]()
        """Examiners that threads are using."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def plan(self, problem: _Problem) -> _Plan:
        """Returns the kept plan of a problem's tests."""
        with self._lock:
            # The other responses to a problem come at the same time: one thread runs its tests for all of them.
            self._changed.wait_for(lambda: problem in self._plans or not self._lent[problem], _PATIENCE_SECONDS)
            if plan := self._plans.get(problem):
                self._plans.move_to_end(problem)
                return plan
            self._lent[problem] += 1
        try:
            return self._examined(problem)
        finally:
            self._return(problem)

    def _examined(self, problem: _Problem) -> _Plan:
        examiner = _Examiner(problem)
        if examiner.plan.says:  # if empty, the examiner may have run out of time on a busy machine
            self.keep(problem, examiner.plan)
        if examiner.plan.says and not examiner.plan.beside:
            self._put(problem, examiner)
        else:
            examiner.close()
        return examiner.plan

    def keep(self, problem: _Problem, plan: _Plan) -> None:
        """Keeps the plan of a problem's tests."""
        with self._lock:
            self._plans[problem] = plan
            while len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)

    def take(self, problem: _Problem) -> _Examiner:
        """Returns an examiner of the problem for one program."""
        with self._lock:
            # To wait for a verdict takes less than to run the tests in another interpreter.
            self._changed.wait_for(lambda: self._places(problem) or not self._lent[problem], _PATIENCE_SECONDS)
            places = self._places(problem)
            examiner = self._idle.pop(places[-1])[1] if places else None
            self._lent[problem] += 1
        try:
            if examiner and examiner.ask("plan"):
                return examiner
            if examiner:  # it has ended since: by the values of an earlier program, or for lack of memory
                examiner.close()
            return _Examiner(problem)
        except BaseException:
            self._return(problem)
            raise

    def give_back(self, problem: _Problem, examiner: _Examiner) -> None:
        """Keeps an examiner for the next program."""
        self._put(problem, examiner)
        self._return(problem)

    def _places(self, problem: _Problem) -> list[int]:
        return [place for place, (other, _) in enumerate(self._idle) if other == problem]

    def _return(self, problem: _Problem) -> None:
        with self._lock:
            self._lent -= Counter([problem])
            self._changed.notify_all()

    def _put(self, problem: _Problem, examiner: _Examiner) -> None:
        with self._lock:
            self._idle.append((problem, examiner))
            gone = self._idle[: -cores()]
            del self._idle[: -cores()]
        for _, each in gone:
            each.close()


_EXAMINERS = _Examiners()
