"""Questions with choices. The policy's answer is the choice that it finds likeliest."""

from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar, Literal

from rpg.data.columns import MissingColumnError, cell, existing_file, missing, names
from rpg.data.problems import SourceProblem
from rpg.data.sources.jsonl import rows_of
from specs.errors import Issue, SpecError
from specs.schema.base import Spec, names_path
from specs.schema.data import Source


class ChoiceColumns(Spec):
    """Names of the columns that hold each part of a question; dots reach into structs."""

    prompt: str = "prompt"
    """Column of the text before the choices."""
    choices: str = "choices"
    """Column of the list of choices."""
    answer: str = "answer"
    """Column of the right choice: its text, its number from 0, or its letter (A for the first choice)."""


class MultipleChoiceSource(Source):
    """An evaluation set without sampling: a JSON Lines file of questions with choices, plain or compressed with gzip.
    A question is right if the right choice has the largest logprob; the set's metric is `accuracy`."""

    answered: ClassVar[bool] = False
    measures: ClassVar[tuple[str, ...]] = ("accuracy",)

    path: str = names_path("file", min_length=1)
    """File, relative to the spec file."""
    columns: ChoiceColumns = ChoiceColumns()
    """Columns that hold each part of a question."""
    per: Literal["byte", "token", "choice"] = "byte"
    """Divisor of a choice's logprob: its bytes (UTF-8), its tokens, or 1."""
    delimiter: str = ""
    """Text between the prompt and a choice, such as a space."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source."""
        file = existing_file(self.path)
        dataset = self.name or Path(file.name.removesuffix(".gz")).stem
        for where, row in rows_of(file):
            prompt, choices, answer = (self._cell(row, role, where) for role in ("prompt", "choices", "answer"))
            if not isinstance(prompt, str):
                raise self._wrong("prompt", where, prompt, "a text")
            texts = isinstance(choices, list) and all(isinstance(each, str) and each for each in choices)
            if not texts or len(set(choices)) < max(2, len(choices)):
                raise self._wrong(
                    "choices", where, choices, "a list of two or more different texts, none of them empty"
                )
            right = _index(answer, choices)
            if right is None:
                allowed = f"the text of a choice, a number from 0 to {len(choices) - 1}, or a letter from A"
                raise self._wrong("answer", where, answer, allowed)
            asked = {"choices": choices, "right": right, "per": self.per, "delimiter": self.delimiter}
            yield SourceProblem(prompt, choices[right], dataset, metadata=asked, where=where)

    def _cell(self, row: dict[str, Any], role: str, where: str) -> Any:
        column = getattr(self.columns, role)
        try:
            return cell(row, column)
        except MissingColumnError:
            raise SpecError(missing(column, role, names(row), where)) from None

    def _wrong(self, role: str, where: str, value: Any, allowed: str) -> SpecError:
        column = getattr(self.columns, role)
        message = f"{where}: `{column}` is not the {role} of a question"
        return SpecError(Issue(message, ("columns", role), repr(value)[:120], allowed))


def _index(answer: Any, choices: list[str]) -> int | None:
    """Returns the number of the right choice; None if the answer does not name a choice.

    Example:
        >>> [_index(answer, ["yes", "no"]) for answer in ("no", 1, "B", "2")]
        [1, 1, 1, None]
    """
    if isinstance(answer, str):
        letter = ascii_uppercase.find(answer) if len(answer) == 1 else -1
        answer = choices.index(answer) if answer in choices else letter
    is_number = isinstance(answer, int) and not isinstance(answer, bool)
    return answer if is_number and 0 <= answer < len(choices) else None
