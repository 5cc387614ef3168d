"""Problems made of bits, and those that a file holds, one a line."""

from collections.abc import Iterator

from pydantic import Field

from rpg.data import Source, SourceProblem
from specs.errors import Issue, SpecError
from specs.schema.base import names_path


class BitStrings(Source):
    """Yields every string of this many bits, each with its first bit for an answer, and the strings of some files."""

    bits: int = Field(ge=1, le=6)
    """Length of a string."""
    files: tuple[str, ...] = names_path("file", ())
    """More strings, one a line; relative to the spec file."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source."""
        for number in range(2**self.bits):
            yield self._problem(f"{number:0{self.bits}b}")
        for index, name in enumerate(self.files):
            with open(name) as file:
                for line in file.read().split():
                    if set(line) - {"0", "1"}:
                        raise SpecError(Issue("not a string of bits", ("files", index), given=line))
                    yield self._problem(line)

    def _problem(self, text: str) -> SourceProblem:
        return SourceProblem(prompt=text + "=", answer=text[0], dataset=self.name or "bits")
