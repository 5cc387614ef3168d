"""Generates problems that ask for a function, given two of its values, with tests that score a program."""

import random
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from rpg.data.problems import SourceProblem
from rpg.data.test_cases import TestCases
from specs.errors import Issue
from specs.schema.data import Source

_SHOWN, _HIDDEN = (1, 2), (0, 5, 10)
"""Arguments at which the function's value is shown, and those at which it is only tested."""


class ExpressionsSource(Source):
    """Linear functions of n, each to be found from its values at 1 and 2: `1:7 2:10 =` asks for `3*n+4`, or for any
    other expression with these values. For `reward: {type: code}`, whose further test values are not shown."""

    generated: ClassVar[bool] = True

    size: int = Field(ge=1)
    """Problems to generate, before deduplication."""
    seed: int = Field(0, ge=0)
    """Seed of the generator."""
    slopes: int = Field(9, ge=1)
    """The factor of n is a whole number from 1 up to this one."""
    offsets: int = Field(20, ge=0)
    """Addends are whole numbers from 0 up to this one."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source."""
        drawn = random.Random(self.seed)
        for _ in range(self.size):
            slope, offset = drawn.randint(1, self.slopes), drawn.randint(0, self.offsets)
            shown, hidden = ([([n], slope * n + offset) for n in places] for places in (_SHOWN, _HIDDEN))
            tests = TestCases("call", shown, hidden, function="f", grader="livecodebench")
            values = " ".join(f"{n}:{value}" for (n,), value in shown)
            name = self.name or "expressions"
            fields, metadata = {"expression": values}, {"tests": tests.as_data()}
            yield SourceProblem(f"{values} =", f"{slope}*n+{offset}", name, fields, metadata)

    def shared_with(self, other: Source) -> Issue | None:
        """See Source; two sources with the same seed share functions."""
        if not isinstance(other, ExpressionsSource) or self.seed != other.seed:
            return None
        return Issue("shares problems with a training set", ("seed",), str(self.seed), hint="take another seed")
