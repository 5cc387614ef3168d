"""Saved queries: files NAME.sql that `rpg sql @NAME` runs, and the values of their parameters."""

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import specs
from pipelines.home.home import Home
from specs.errors import RpgError


@dataclass(frozen=True, slots=True)
class SavedQuery:
    """A query in a file."""

    name: str
    path: Path

    @property
    def text(self) -> str:
        """Returns the statement, with its comments."""
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RpgError(f"{self.path} cannot be read: {error}") from error

    @property
    def description(self) -> str:
        """Returns the comment at the beginning of the file, on one line."""
        comment = re.match(r"(?:\s*--[^\n]*\n?)*", self.text)
        assert comment
        return " ".join(line.strip().removeprefix("--").strip() for line in comment[0].splitlines()).strip()


def saved_queries(home: Home) -> dict[str, SavedQuery]:
    """Returns the saved queries by name: those in `queries/` of the working directory, then those of the home, then
    those that come with rpg."""
    places = (Path("queries"), home.root / "queries", Path(specs.__file__).parent / "queries")
    queries: dict[str, SavedQuery] = {}
    for path in (path for place in places for path in sorted(place.glob("*.sql"))):
        queries.setdefault(path.stem, SavedQuery(path.stem, path))
    return dict(sorted(queries.items()))


def find_query(home: Home, name: str) -> SavedQuery:
    """Returns the saved query of this name. Raises RpgError if it does not exist."""
    queries = saved_queries(home)
    if name in queries:
        return queries[name]
    near = difflib.get_close_matches(name, queries, n=1)
    hint = f"did you mean `@{near[0]}`?" if near else f"write the query to the file `queries/{name}.sql`"
    raise RpgError(f"there is no saved query `{name}`\n  there are: {', '.join(queries)}\n  hint: {hint}")


def parse_params(given: list[str]) -> list[object] | dict[str, object]:
    """Parses the values of `--param`: NAME=VALUE for `$NAME`, else one VALUE for each `?`, in order.

    A value that is JSON is read as JSON (10, 0.5, true, null, "text"), any other as text.
    """
    named = [re.fullmatch(r"(?s)([A-Za-z_]\w*)=(.*)", text) for text in given]
    if not any(named):
        return [_value(text) for text in given]
    if not all(named):
        hint = "write a VALUE that contains `=` as JSON: '\"a=b\"'"
        raise RpgError(f"--param: name all values (NAME=VALUE), or none and keep their order (VALUE)\n  hint: {hint}")
    return {match[1]: _value(match[2]) for match in named if match}


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
