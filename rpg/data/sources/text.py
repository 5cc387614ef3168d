"""Texts that the policy is to predict."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from rpg.data.columns import MissingColumnError, cell, existing_file, missing, names
from rpg.data.problems import SourceProblem
from rpg.data.sources.jsonl import rows_of
from specs.errors import Issue, SpecError
from specs.schema.base import names_path
from specs.schema.data import Source

_JSONL = (".jsonl", ".jsonl.gz")


class TextSource(Source):
    """An evaluation set without sampling: a text file in UTF-8, or the texts of a JSON Lines file. Its metric is
    `bits_per_byte`: minus the logprob of all tokens to the base 2, over the bytes (UTF-8)."""

    answered: ClassVar[bool] = False
    measures: ClassVar[tuple[str, ...]] = ("bits_per_byte",)

    path: str = names_path("file", min_length=1)
    """File, relative to the spec file: one document, or, if its name ends in .jsonl or .jsonl.gz, a document a line."""
    column: str = "text"
    """Column of the documents in a JSON Lines file."""
    window: int = Field(2048, ge=2)
    """Largest number of tokens that a token's logprob may depend on, itself included; less if the model's context is
    shorter. A longer document is cut into windows that begin with the last token of the one before."""
    piece: int = Field(256, ge=1)
    """Bytes of a piece. A document is cut into pieces between tokens, and the interval treats them as independent."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source."""
        file = existing_file(self.path)
        dataset = self.name or Path(file.name.removesuffix(".gz")).stem
        for where, text in self._documents(file):
            if not text.strip():
                raise SpecError(Issue(f"{where}: there is no text", ("path",), given=self.path))
            yield SourceProblem(text, "", dataset, metadata={"window": self.window, "piece": self.piece}, where=where)

    def _documents(self, file: Path) -> Iterator[tuple[str, str]]:
        if not file.name.endswith(_JSONL):
            try:
                yield file.name, file.read_bytes().decode("utf-8")
            except UnicodeDecodeError as error:
                raise SpecError(Issue(f"{file.name} is not UTF-8: {error}", ("path",), given=self.path)) from None
            return
        for where, row in rows_of(file):
            try:
                text = cell(row, self.column)
            except MissingColumnError:
                issue = missing(self.column, "text", names(row), where)
                hint = "say which column holds the text: `column: ...`"
                raise SpecError(Issue(issue.message, ("column",), issue.given, issue.allowed, hint)) from None
            if not isinstance(text, str):
                raise SpecError(Issue(f"{where}: `{self.column}` is not a text", ("column",), repr(text)[:120]))
            yield where, text
