"""A home that is made here is its user's alone; one that is there stays as it is, and doctor says who can get at it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.prefect.server.settings import embedded_environment, sqlite_file
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


@pytest.mark.parametrize("name", ["feature%2Flogin", "what now?", "a#b", "50%", "Prüfung", ":memory:"])
def test_the_servers_database_is_in_its_home_whatever_that_is_called(name: str, tmp_path: Path) -> None:
    home = Home(tmp_path / name / "home")
    file = sqlite_file(home)
    file.parent.mkdir(parents=True)
    url = embedded_environment(home, "http://127.0.0.1:4200/api")["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    engine = create_engine(make_url(url).set(drivername="sqlite"))
    with engine.begin() as connection:
        connection.execute(text("create table t (a int)"))
    engine.dispose()
    assert file.stat().st_size
    assert ":memory:" not in url
    assert list(tmp_path.iterdir()) == [tmp_path / name]


@pytest.mark.more
@pytest.mark.parametrize(("name", "reason"), [(b"caf\xe9", "reads paths as UTF-8"), (b"a\\b[1]", "a backslash and")])
def test_a_home_that_duckdb_cannot_read_is_refused_at_once(name: bytes, reason: str, tmp_path: Path) -> None:
    environment = {**os.environb, b"RPG_HOME": os.fsencode(tmp_path) + b"/" + name}
    program = "from pipelines.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "runs"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 2)
    assert reason in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.more
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
    assert note == f"other users can access {home} (mode 755): `chmod 700` prevents it"
    home.chmod(0o700)
    assert notes_on_the_mode(home) == []
    assert notes_on_the_mode(tmp_path / "none") == []
