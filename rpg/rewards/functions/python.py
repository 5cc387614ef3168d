"""A reward function in a user's own file."""

import ast
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr, model_validator

from rpg.data.columns import TableSource
from rpg.rewards.score import Score
from rpg.types import Problem
from specs.errors import Issue, IssueError
from specs.schema.base import names_path
from specs.schema.data import Source
from specs.schema.reward import Reward

_TRL = "completions"
"""The argument that identifies a function with TRL's signature."""
_OWN = ("prompt", "answer", "dataset")
"""Arguments that every problem provides."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a reward function. All are passed by name."""

    named: tuple[str, ...]
    required: tuple[str, ...]
    """Arguments without a default."""

    @property
    def given(self) -> tuple[str, ...]:
        """Returns the names of the arguments that need no column."""
        own = ("prompts", _TRL) if _TRL in self.named else ("problem", "response")
        return (*_OWN, *own)

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Returns the required arguments that no column provides."""
        known = {*self.given, *columns}
        return [name for name in self.required if name not in known]


def arguments_of(tree: ast.Module, function: str) -> Arguments:
    """Returns the arguments of a module's function."""
    found = [node.args for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function][-1]
    positional = [*found.posonlyargs, *found.args]
    required = positional[: len(positional) - len(found.defaults)]
    required += [each for each, default in zip(found.kwonlyargs, found.kw_defaults, strict=True) if default is None]
    return Arguments(tuple(each.arg for each in (*positional, *found.kwonlyargs)), tuple(each.arg for each in required))


class Python(Reward):
    """A function of a Python file, called in the scoring sandbox: without a network, and without the machine's files
    except Python and its packages. Needs bubblewrap.

    The function's parameters select its arguments: `response`, `answer`, `prompt`, `problem`, or a column of the data.
    It returns a number. A function with the parameter `completions`, as in TRL, gets lists of one item, and returns
    such a list.
    """

    sealed: ClassVar = "always"
    libraries: ClassVar[tuple[str, ...]] = ("python",)

    path: str = names_path("file")
    """Path of the file, relative to the spec file. It can import installed packages, but none of your other files."""
    function: str = Field("score", pattern=r"^[^\W\d]\w*$")
    """The function's name."""
    code: str = Field("", max_length=1 << 16)
    """Text of the file, at most 64 KiB. It is filled in when a spec is read, and travels with the spec."""
    gives: str = Field("right_or_wrong", pattern="^(right_or_wrong|grades)$")
    """Meaning of the numbers. right_or_wrong: at least 1 means a right answer. grades: they grade responses, and
    evaluations have their mean, `score@k`."""
    least: float | None = None
    """With grades: the least possible number, used for a seed whose training failed. If left out, it is unknown."""

    _function: Callable[..., Any] | None = PrivateAttr(None)
    _broken: BaseException | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check(self) -> "Python":
        if issue := next(self._issues(), None):
            raise IssueError(issue)
        return self

    def _issues(self) -> Iterator[Issue]:
        if not self.code:
            yield Issue("the file is empty", ("path",), self.path)
            return
        try:
            tree = ast.parse(self.code)
        except (SyntaxError, ValueError) as error:
            line, text = getattr(error, "lineno", 0) or 0, getattr(error, "text", "") or ""
            words = getattr(error, "msg", str(error))
            yield Issue(f"is not valid Python: {words}", ("path",), file=self.path, line=line, snippet=text)
            return
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        if self.function not in functions:
            allowed = ", ".join(functions) or "the file has no function"
            yield Issue("the file has no such function", ("function",), self.function, allowed)
        if self.least is not None and self.gives != "grades":
            yield Issue("belongs to `gives: grades`", ("least",), f"{self.least:g}")

    def identity(self) -> dict[str, Any]:
        """See Spec; the file counts by its content, not by its path."""
        plain = super().identity()
        del plain["path"]
        return plain | {"code": {"content": hashlib.sha256(self.code.encode()).hexdigest()}}

    def refuses(self, source: Source) -> Issue | None:
        """See Reward. The set must keep the columns that the function takes."""
        if not isinstance(source, TableSource):
            return None
        columns, own = (
            source.columns,
            [*(["user"] if source.columns.user else []), *(["tests"] if source.tests != "none" else [])],
        )
        arguments = self._arguments()
        known = [*arguments.given, *columns.keep, *columns.shown, *own]
        if not (missing := arguments.missing(known)):
            return None
        written = columns.model_dump(mode="json", exclude_unset=True) | {"keep": [*columns.keep, *missing]}
        line = json.dumps(written, ensure_ascii=False).replace('"', "")
        message = f"{self.function} takes {', '.join(f'`{name}`' for name in missing)}, which the set does not keep"
        return Issue(message, (), allowed=", ".join(dict.fromkeys(known)), hint=f"write `columns: {line}`")

    def objects_to(self, problem: Problem) -> Issue | None:
        """See Reward."""
        if missing := self._arguments().missing(problem.metadata):
            known = ", ".join(dict.fromkeys([*self._arguments().given, *problem.metadata]))
            return Issue(f"{self.function} takes `{missing[0]}`, which a problem does not have", (), allowed=known)
        return None

    def _arguments(self) -> Arguments:
        return arguments_of(ast.parse(self.code), self.function)

    def grades(self) -> bool:
        """See Reward."""
        return self.gives == "grades"

    def worst_value(self) -> float | None:
        """See Reward."""
        return self.least

    def written_in(self) -> tuple[str, ...]:
        """See Reward."""
        return (self.path,)

    def prepare(self) -> None:
        """See Reward. Runs the file. If that raises an error, every response gets the error."""
        names: dict[str, Any] = {"__name__": "reward", "__file__": self.path}
        try:
            exec(compile(self.code, self.path, "exec"), names)
            self._function = names[self.function]
        except (Exception, SystemExit) as error:
            self._broken = error

    def score(self, problem: Problem, response: str) -> Score:
        """See Reward."""
        if self._broken is not None:
            if isinstance(self._broken, Exception):
                raise self._broken
            raise RuntimeError(f"{self.path} ended its process when it was read")
        assert self._function is not None
        taken = inspect.signature(self._function).parameters
        value = self._of_one(problem, response, taken) if _TRL in taken else self._plain(problem, response, taken)
        if isinstance(value, Score):
            return value
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"{self.function} returned {value!r}, not a number") from None
        if not math.isfinite(number):
            raise ValueError(f"{self.function} returned {number}")
        return Score.of(number, response.removeprefix(problem.prefill).strip() or None)

    def _plain(self, problem: Problem, response: str, taken: Any) -> Any:
        assert self._function is not None
        known = _columns(problem) | {"problem": problem, "response": response}
        return self._function(**self._wanted(known, taken))

    def _of_one(self, problem: Problem, response: str, taken: Any) -> Any:
        assert self._function is not None
        columns = _columns(problem)
        known = {name: [value] for name, value in columns.items()}
        known |= {"prompts": [problem.prompt], _TRL: [response]}
        values = self._function(**self._wanted(known, taken))
        if not isinstance(values, (list, tuple)) or len(values) != 1:
            raise TypeError(f"{self.function} returned {values!r}, not a list with one number for one completion")
        return values[0]

    def _wanted(self, known: dict[str, Any], taken: Any) -> dict[str, Any]:
        """Returns the arguments that the function takes. Raises ValueError if one is missing."""
        kinds = {parameter.kind for parameter in taken.values()}
        named = {name: each for name, each in taken.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
        absent = [name for name, each in named.items() if name not in known and each.default is each.empty]
        if absent:
            raise ValueError(f"{self.function} takes {absent[0]!r}, but a problem has only: {', '.join(known)}")
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return known
        return {name: value for name, value in known.items() if name in named}


def _columns(problem: Problem) -> dict[str, Any]:
    """Returns the problem's columns by name."""
    own = {"prompt": problem.prompt, "answer": problem.answer, "dataset": problem.dataset}
    return {**problem.metadata, **own}
