"""The tables of cheats in docs/own-reward.md match the measurements."""

import cheats
import pytest

CHEAP = {
    "calls": ("an object that equals everything", "the expected value from the frames of its callers"),
    "stdin": ("`unittest.mock.ANY`", "a forged line at its end"),
    "asserts": (
        *("`unittest.mock.ANY`", "`builtins.exec` replaced", "the expected value from `linecache`"),
        *("`StopIteration`, which ends a `map`", "an array of numpy that has the shape `(0, 1)`", "an empty list"),
    ),
    "beside": ("an `int` that equals everything", "`ast.parse` replaced", "the expected value from all objects"),
    "objects": ("an object that equals everything", "`os._exit(0)` when it is called"),
    "C++": ("`exit(0)`", "brackets"),
    "compares": ("brackets", "code that ends with 0"),
    "evaluates": ("an object that equals everything", "code that raises"),
    "reasoning_gym": ("an object that equals everything", "code that replaces `Score.of`"),
    "tool": ("variables", "the tasks of the evaluation, generated again"),
}
"""Cheats of each grader that are tried each time."""


def on_page() -> dict[str, cheats.Outcome]:
    """Returns the page's table of each grader."""
    found: dict[str, cheats.Outcome] = {}
    for table in cheats.on_page().split("\n\n")[1:]:
        head, _, *rows = ([cell.strip() for cell in line.split(" | ")] for line in table.splitlines())
        for column, grader in enumerate(head[1:-1], 1):
            found[grader] = {row[0].removeprefix("| "): row[column] == "**passes**" for row in rows}
    return found


def test_each_grader_has_its_table_with_at_least_twenty_cheats() -> None:
    assert set(on_page()) == set(cheats.GRADERS) == set(CHEAP)
    assert min(map(len, on_page().values())) >= 20
    programs = {cheat.name for cheat in cheats.PYTHON}
    assert programs == set(on_page()["calls"])


@pytest.mark.more
@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize(
    "grader", [pytest.param(each, marks=pytest.mark.needs("g++") if each == "C++" else ()) for each in cheats.GRADERS]
)
def test_cheats_get_what_the_page_says(grader: str) -> None:
    tried = cheats.GRADERS[grader][1](CHEAP[grader])
    assert tried == {name: on_page()[grader][name] for name in CHEAP[grader]}


@pytest.mark.long
@pytest.mark.needs("bubblewrap")
def test_the_tables_are_what_all_cheats_get() -> None:
    assert cheats.tables(cheats.measured()) == cheats.on_page()
