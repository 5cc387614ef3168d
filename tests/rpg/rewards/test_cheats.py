"""The tables of cheats in docs/own-reward.md match the measurements."""

import cheats
import pytest


def on_page() -> dict[str, cheats.Outcome]:
    """Returns the page's table of each grader."""
    found: dict[str, cheats.Outcome] = {}
    for table in cheats.on_page().split("\n\n")[1:]:
        head, _, *rows = ([cell.strip() for cell in line.split(" | ")] for line in table.splitlines())
        for column, grader in enumerate(head[1:-1], 1):
            found[grader] = {row[0].removeprefix("| "): row[column] == "**passes**" for row in rows}
    return found


def test_each_grader_has_its_table_with_at_least_twenty_cheats() -> None:
    assert set(on_page()) == set(cheats.GRADERS)
    assert min(map(len, on_page().values())) >= 20
    programs = {cheat.name for cheat in cheats.PYTHON}
    assert programs == set(on_page()["calls"])


@pytest.mark.more
@pytest.mark.needs("bubblewrap")
@pytest.mark.needs("g++")
def test_the_tables_are_what_all_cheats_get() -> None:
    assert cheats.tables(cheats.measured()) == cheats.on_page()
