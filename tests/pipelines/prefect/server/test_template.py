"""The database that a home's first server begins with."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest

from pipelines.prefect.server import template
from pipelines.prefect.server.template import begin_with_template, keep_template, schema_of

SCHEMAS = template._SCHEMAS

TABLES = """\
CREATE TABLE block_type (name TEXT); CREATE TABLE flow_run (name TEXT); CREATE TABLE configuration (key TEXT);
CREATE TABLE block_document (data TEXT); CREATE INDEX of_name ON flow_run (name);
INSERT INTO block_type VALUES ('made by a migration');
"""
MORE_THAN_MIGRATIONS = [
    "INSERT INTO flow_run VALUES ('mine')",
    "INSERT INTO configuration VALUES ('mine')",
    "INSERT INTO block_document VALUES ('mine')",
    "CREATE TABLE own (name TEXT); INSERT INTO own VALUES ('mine')",
    "CREATE TRIGGER own AFTER INSERT ON flow_run BEGIN UPDATE flow_run SET name = 'mine'; END",
    "CREATE VIEW own AS SELECT * FROM flow_run",
    "CREATE TABLE own (name TEXT)",
    "DROP TABLE configuration; CREATE TABLE configuration (key TEXT DEFAULT 'mine')",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """There is no template yet, and migrations make these tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(TABLES)
        monkeypatch.setattr(template, "_SCHEMAS", {version("prefect"): schema_of(database)})
    return tmp_path / "cache"


def made(path: Path, more: str = "") -> Path:
    with closing(sqlite3.connect(path)) as database:
        database.executescript(TABLES + more)
    return path


def test_a_home_begins_with_what_the_first_server_of_another_has_made(tmp_path: Path, cache: Path) -> None:
    assert begin_with_template(tmp_path / "first.db")
    assert not (tmp_path / "first.db").exists()
    keep_template(made(tmp_path / "first.db"))
    assert begin_with_template(tmp_path / "second.db")
    with closing(sqlite3.connect(tmp_path / "second.db")) as database:
        assert database.execute("SELECT name FROM block_type").fetchall() == [("made by a migration",)]
    (kept,) = cache.rglob("*.db")
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("more", MORE_THAN_MIGRATIONS)
def test_a_template_holds_nothing_but_what_migrations_make(tmp_path: Path, cache: Path, more: str) -> None:
    keep_template(made(tmp_path / "first.db", more))
    begin_with_template(tmp_path / "second.db")
    assert not (tmp_path / "second.db").exists()
    assert not [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize("more", MORE_THAN_MIGRATIONS)
def test_a_template_that_holds_more_is_not_taken(tmp_path: Path, cache: Path, more: str) -> None:
    keep_template(made(tmp_path / "first.db"))
    (kept,) = cache.rglob("*.db")
    os.replace(made(tmp_path / "other.db", more), kept)
    assert begin_with_template(tmp_path / "second.db")
    assert not (tmp_path / "second.db").exists()


def test_a_database_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    keep_template(made(tmp_path / "first.db"))
    made(tmp_path / "mine.db", "INSERT INTO flow_run VALUES ('mine')")
    assert not begin_with_template(tmp_path / "mine.db")
    with closing(sqlite3.connect(tmp_path / "mine.db")) as database:
        assert database.execute("SELECT name FROM flow_run").fetchall() == [("mine",)]


@pytest.mark.more
def test_a_template_of_the_installed_prefect_has_the_schema_that_its_migrations_make(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    environment["PREFECT_API_DATABASE_CONNECTION_URL"] = f"sqlite+aiosqlite:///{tmp_path}/made.db"
    migrate = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
    subprocess.run(migrate, check=True, env=environment, stdout=subprocess.DEVNULL)
    with closing(sqlite3.connect(tmp_path / "made.db")) as database:
        assert schema_of(database) == SCHEMAS[version("prefect")]


def test_no_template_is_kept_of_a_version_whose_schema_is_not_known(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "_SCHEMAS", {})
    keep_template(made(tmp_path / "first.db"))
    assert begin_with_template(tmp_path / "second.db")
    assert not (tmp_path / "second.db").exists()
    assert not [*cache.rglob("*.db")]
