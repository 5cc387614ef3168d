"""A home that is made here is its user's alone; one that is there stays as it is, and doctor says who can get at it."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.studies.storage import open_storage
from storage.ingest import ingest


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    """With which directories are open to all."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def take_a_lock(home: Home) -> None:
    with home.locked("any", waiting=lambda: None):
        pass


@pytest.mark.parametrize(
    "first_use",
    [Home.create, take_a_lock, lambda home: ingest(home.root), lambda home: open_storage(home, "a-study")],
    ids=["create", "lock", "ingest", "study"],
)
def test_whatever_makes_a_home_makes_it_for_its_user_alone(tmp_path: Path, first_use: Callable[[Home], None]) -> None:
    home = Home(tmp_path / "parent" / "home")
    first_use(home)
    assert mode(home.root) == 0o700
    home.root.chmod(0o750)
    first_use(home)
    assert mode(home.root) == 0o750


def test_a_home_that_a_run_made_is_its_users_alone(prepared_home: Path) -> None:
    assert mode(prepared_home) == 0o700


def notes_on_the_mode(home: Path) -> list[str]:
    result = CliRunner().invoke(app, ["doctor", "--json"], env={"RPG_HOME": str(home), "RPG_PROFILE": ""})
    assert result.exit_code == 0
    return [finding["message"] for finding in json.loads(result.stdout) if finding["name"] == "home's mode"]


def test_doctor_notes_a_home_that_others_can_read(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    (note,) = notes_on_the_mode(home)
    assert note == f"other users can get at {home}: `chmod 700` keeps them out (755)"
    home.chmod(0o700)
    assert notes_on_the_mode(home) == []
    assert notes_on_the_mode(tmp_path / "none") == []
