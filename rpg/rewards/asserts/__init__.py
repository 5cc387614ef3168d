"""Tests of a program that are asserts. The program runs in one process of the sandbox, the tests in another.

A call of the program's function goes to the program's process, and its value comes back as plain data: no object of the
program's is ever compared, and no expected value is where the program can read it. Tests whose form needs more than
values run beside the program.
"""

import binascii
import marshal
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rpg.sandbox import Sandbox, SandboxError, Session
from rpg.sandbox.room import cores

_MODULES = ("values", "examination", "beside")
"""Modules that run in the sandbox, each with those before it."""
_LOADER = """
def _inside():
    import binascii, builtins, marshal, sys, types, zlib
    names = {}
    for name, code in marshal.loads(zlib.decompress(binascii.a2b_base64("PACKED"))):
        module = sys.modules[name] = types.ModuleType(name)
        module.__builtins__ = vars(builtins).copy()
        exec(code, vars(module))
        names |= vars(module)
    return names
_inside = _inside()
"""
_MOST_KNOWN = 4096
"""Problems of which it is kept that their tests run beside the program."""


def asserted(sandbox: Sandbox, tests: dict[str, Any], chosen: Sequence[str], code: str) -> Iterator[bool]:
    """Yields for one test after another whether the program passes it.

    Args:
        tests: see `rpg.data.test_cases.TestCases`.
        chosen: statements.
        code: the program.
    """
    with _EXAMINERS.lent(sandbox, tests, chosen) as examiner:
        passes = _passes_beside if examiner is None else partial(_passes, examiner)
        with sandbox.session() as session:
            yield from passes(session, sandbox.limits.seconds, tests, chosen, code)


def _passes(
    examiner: "_Examiner", program: Session, seconds: float, tests: dict[str, Any], chosen: Sequence[str], code: str
) -> Iterator[bool]:
    ready = program.execute(f"{tests['setup']}\n{_loading('values')}").fine and _loads_whole(program, tests, code)
    for number in range(len(chosen)):
        yield ready and _passes_one(examiner, program, number, seconds)


def _loads_whole(program: Session, tests: dict[str, Any], code: str) -> bool:
    """Whether the program comes to its end. Else it may have ended by `exit(0)`, before its last line."""
    return _said(program, f"{_completed(tests, code)}\n_inside['reply']('loaded')") == "loaded"


def _passes_one(examiner: "_Examiner", program: Session, number: int, seconds: float) -> bool:
    calls, first = examiner.first_calls[number], True
    while calls and seconds > 0:
        values = "[]"
        if calls != "[]":
            outcome = program.execute(f"_inside['answer']({calls!r}, globals())")
            values, seconds = outcome.stdout.rpartition("\n")[2] if outcome.fine else "", seconds - outcome.seconds
        said = examiner.judge(number, values, first=first)
        if said in ("", "passed", "failed"):
            return said == "passed"
        calls, first = said, False
    return False


def _passes_beside(
    session: Session, _seconds: float, tests: dict[str, Any], chosen: Sequence[str], code: str
) -> Iterator[bool]:
    given = (f"{tests['setup']}\n", list(chosen), tests["function"])
    ready = session.execute(f"{_loading('beside')}\n_tests = _inside['Beside'](*{given!r})").fine
    ready = ready and _said(session, f"_inside['reply'](str(_tests.start({_completed(tests, code)!r})))") == "True"
    for number in range(len(chosen)):
        yield ready and _said(session, f"_inside['reply'](str(_tests.passes({number})))") == "True"


def _completed(tests: dict[str, Any], code: str) -> str:
    """The program; where it is but the body of the function that the problem begins, with that beginning."""
    is_body = tests["function"] and not re.search(rf"\b{re.escape(tests['function'])}\b", code)
    return tests["setup"] + code if is_body else code


def _said(session: Session, code: str) -> str:
    """The last line that the code prints; empty where it does not come to its end."""
    outcome = session.execute(code)
    return outcome.stdout.rpartition("\n")[2] if outcome.fine else ""


@lru_cache(maxsize=3)
def _loading(last: str) -> str:
    """Code that loads our modules up to the last, whose names are then in `_inside`. Each has builtins of its own,
    which no program replaces."""
    names = _MODULES[: _MODULES.index(last) + 1]
    codes = {f"{__name__}.{name}": (Path(__file__).with_name(f"{name}.py")).read_text() for name in names}
    compiled = marshal.dumps([(name, compile(code, f"<{name}>", "exec", optimize=2)) for name, code in codes.items()])
    packed = binascii.b2a_base64(zlib.compress(compiled), newline=False).decode()
    return _LOADER.replace("PACKED", packed)


class _Examiner:
    """An interpreter with the tests of a problem, and nothing of a program."""

    def __init__(self, sandbox: Sandbox, tests: dict[str, Any], chosen: Sequence[str]) -> None:
        self._session = sandbox.session()
        given = (f"{tests['setup']}\n", list(chosen), tests["function"])
        opened = self._session.execute(f"{_loading('examination')}\n_tests = _inside['Examination'](*{given!r})").fine
        self.first_calls = [self._ask("first_calls()") if opened else "" for _ in chosen]
        """Calls that each test makes first, JSON; `beside` where it needs the program itself; empty where it fails
        whatever the program is."""

    def begin(self) -> bool:
        """Forgets an earlier program. Whether the interpreter is still there."""
        with suppress(SandboxError):
            return self._session.execute("_tests.begin()").fine
        return False

    def judge(self, number: int, values: str, *, first: bool) -> str:
        """See `Examination.judge`; empty where it came to no end."""
        return self._ask(f"judge({number}, {values!r}, first={first})")

    def close(self) -> None:
        """Ends the interpreter."""
        self._session.close()

    def _ask(self, call: str) -> str:
        return _said(self._session, f"_inside['reply'](_tests.{call})")


class _Examiners:
    """Examiners of problems, which go from one response to the next. Those that idle are as many as there are cores."""

    def __init__(self) -> None:
        self._idle: OrderedDict[Any, list[_Examiner]] = OrderedDict()
        self._beside: OrderedDict[Any, None] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, sandbox: Sandbox, tests: dict[str, Any], chosen: Sequence[str]) -> Iterator[_Examiner | None]:
        """An examiner for one program; None where the tests run beside it."""
        key = (sandbox, tests["setup"], tests["function"], tuple(chosen))
        examiner = self._taken(key) or self._opened(key, sandbox, tests, chosen)
        try:
            yield examiner
        finally:
            if examiner:
                self._give_back(key, examiner)

    def _taken(self, key: Any) -> _Examiner | None:
        with self._lock:
            examiners = self._idle.get(key)
            examiner = examiners.pop() if examiners else None
            if not examiners:
                self._idle.pop(key, None)
        if examiner is None or examiner.begin():
            return examiner
        examiner.close()
        return None

    def _opened(self, key: Any, sandbox: Sandbox, tests: dict[str, Any], chosen: Sequence[str]) -> _Examiner | None:
        with self._lock:
            if key in self._beside:
                return None
        examiner = _Examiner(sandbox, tests, chosen)
        if "beside" not in examiner.first_calls:
            examiner.begin()
            return examiner
        examiner.close()
        with self._lock:
            self._beside[key] = None
            while len(self._beside) > _MOST_KNOWN:
                self._beside.popitem(last=False)
        return None

    def _give_back(self, key: Any, examiner: _Examiner) -> None:
        with self._lock:
            self._idle.setdefault(key, []).append(examiner)
            self._idle.move_to_end(key)
            gone = []
            while sum(map(len, self._idle.values())) > cores():
                oldest, examiners = next(iter(self._idle.items()))
                gone.append(examiners.pop(0))
                if not examiners:
                    del self._idle[oldest]
        for each in gone:
            each.close()


_EXAMINERS = _Examiners()
