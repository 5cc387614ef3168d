"""Published evaluation sets by name, with their place on the Hub, split and columns."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from rpg.data.columns import Columns
from rpg.data.problems import SourceProblem
from rpg.data.sources.hub import HubSource
from specs.schema.base import names_path
from specs.schema.data import Source


@dataclass(frozen=True, slots=True)
class _Published:
    """A dataset on the Hub, as its card describes it."""

    path: str
    split: str
    columns: Columns


_PROBLEM = Columns(prompt="problem", answer="answer")
_QUESTION = Columns(prompt="question", answer="answer")
SUITES = {
    "aime24": _Published("HuggingFaceH4/aime_2024", "train", _PROBLEM),
    "aime25": _Published("math-ai/aime25", "test", _PROBLEM),
    "amc23": _Published("math-ai/amc23", "test", _QUESTION),
    "minerva": _Published("math-ai/minervamath", "test", _QUESTION),
    "olympiadbench": _Published(
        "math-ai/olympiadbench", "test", Columns(prompt="question", answer="final_answer", answer_list=True)
    ),
    "math500": _Published("HuggingFaceH4/MATH-500", "test", _PROBLEM),
}
_INSTRUCTIONS = {
    "none": "{}",
    "answer_line": (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
        " $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    ),
    "boxed": "{}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
}


class SuiteSource(Source):
    """A published evaluation set by its name; docs/own-data.md has the protocols of their published scores."""

    name: Literal["aime24", "aime25", "amc23", "minerva", "olympiadbench", "math500"]
    """Name of the set, also in evaluations and tables."""
    instruction: Literal["none", "answer_line", "boxed"] = "none"
    """Instruction around the question, before data.prompt: the sentences of DAPO-Math's, AIME's and AMC's files, which
    ask for a line with Answer: (which math_dapo reads), or a request for a boxed answer (which math_verify reads)."""
    path: str = names_path("path or id", "")
    """A directory with a copy, or another dataset with the same columns. Empty uses the set's own dataset on the
    Hub."""
    revision: str = "main"
    """Branch, tag or commit on the Hub."""

    def identity(self) -> dict[str, Any]:
        """See Spec; includes the dataset that the name stands for."""
        known = SUITES[self.name]
        dataset = {"path": self.path or known.path, "split": known.split, "columns": known.columns.identity()}
        return super().identity() | dataset

    def read(self) -> Iterator[SourceProblem]:
        """See Source."""
        return map(self._asked, self._dataset().read())

    def peek(self, count: int) -> Iterator[SourceProblem]:
        """See Source; returns no problems of a dataset that may need a download."""
        return map(self._asked, self._dataset().peek(count))

    def is_here(self) -> bool:
        """See Source."""
        return self._dataset().is_here()

    def _dataset(self) -> HubSource:
        known = SUITES[self.name]
        return HubSource(
            source="hub",
            name=self.name,
            path=self.path or known.path,
            split=known.split,
            revision=self.revision,
            columns=known.columns,
        )

    def _asked(self, problem: SourceProblem) -> SourceProblem:
        if not isinstance(problem.prompt, str):
            return problem  # messages contain their instruction
        return replace(problem, prompt=_INSTRUCTIONS[self.instruction].format(problem.prompt))
