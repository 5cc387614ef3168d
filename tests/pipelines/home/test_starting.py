"""What other commands say of an experiment that is starting, before its runs are recorded."""

import threading
from pathlib import Path

import pytest
from recorded_home import record_experiment, record_run
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.home.starting import announced, starting
from specs.machine.files import write_json


def test_runs_and_watch_say_that_an_experiment_is_starting_and_watch_waits(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))
    rpg = CliRunner()
    with announced(home, "sums") as recorded:
        assert "sums is starting: its data and its model are being checked\n" in rpg.invoke(app, ["runs"]).stderr
        assert rpg.invoke(app, ["runs", "--experiment", "other"]).stderr.startswith("no runs of other")

        def record() -> None:
            record_experiment(home, [record_run(home, "sums-s0")])
            recorded()

        recording = threading.Timer(0.3, record)
        recording.start()
        watched = rpg.invoke(app, ["watch", "sums"])
        recording.join()
    assert (watched.exit_code, watched.stdout.split()[0]) == (0, "finished")
    assert watched.stderr.startswith("sums is starting: ")
    assert "starting" not in rpg.invoke(app, ["runs"]).stderr


def test_a_command_that_fails_or_was_killed_leaves_no_note(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with announced(home, "sums"):
        assert starting(home) == ["sums"]
    assert not home.root.exists()
    killed = home.root / "locks" / "starting" / "1.json"
    killed.parent.mkdir(parents=True)
    write_json(killed, {"name": "old", "pid": 1, "started": "another start"})
    assert starting(home) == []
    with announced(home, "sums"):
        assert not killed.exists()
    assert home.root.exists(), "it was there before"
