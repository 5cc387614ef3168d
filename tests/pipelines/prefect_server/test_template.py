"""The database that a home's first server begins with."""

import sqlite3
from contextlib import closing

import pytest

from pipelines.prefect_server.template import begin_with_template, keep_template

TABLES = """\
CREATE TABLE block_type (name TEXT); CREATE TABLE flow_run (name TEXT); CREATE TABLE configuration (key TEXT);
INSERT INTO block_type VALUES ('made by a migration');
"""


@pytest.fixture(autouse=True)
def no_template_yet(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.prefect_server.template._template", lambda: tmp_path / "assets" / "3.db")


def made(path, more: str = ""):
    with closing(sqlite3.connect(path)) as database:
        database.executescript(TABLES + more)
    return path


def test_a_home_begins_with_what_the_first_server_of_another_has_made(tmp_path):
    assert begin_with_template(tmp_path / "first.db")
    keep_template(made(tmp_path / "first.db"))
    assert begin_with_template(tmp_path / "second.db")
    with closing(sqlite3.connect(tmp_path / "second.db")) as database:
        assert database.execute("SELECT name FROM block_type").fetchall() == [("made by a migration",)]
    (template,) = (tmp_path / "assets").rglob("*.db")
    assert template.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("table", ["flow_run", "configuration"])
def test_what_is_somebodys_is_in_no_template(tmp_path, table):
    keep_template(made(tmp_path / "first.db", f"INSERT INTO {table} VALUES ('mine')"))
    begin_with_template(tmp_path / "second.db")
    assert not (tmp_path / "second.db").exists()
    assert not [path for path in (tmp_path / "assets").rglob("*") if path.is_file()]


def test_a_database_that_is_there_stays_as_it_is(tmp_path):
    keep_template(made(tmp_path / "first.db"))
    made(tmp_path / "mine.db", "INSERT INTO flow_run VALUES ('mine')")
    assert not begin_with_template(tmp_path / "mine.db")
    with closing(sqlite3.connect(tmp_path / "mine.db")) as database:
        assert database.execute("SELECT name FROM flow_run").fetchall() == [("mine",)]
