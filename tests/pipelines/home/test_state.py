"""state.json is whole at every moment."""

import json

import pytest

from pipelines.home.home import Home
from pipelines.home.state import RunState, write_once
from specs.machine.files import read_json, write_json


def test_every_change_is_on_disk_and_read_back(tmp_path):
    home = Home(tmp_path)
    state = RunState(home, "run-1")
    assert state.status == "pending"
    state.update(status="running", pid=7)
    state.update_stage("data", status="finished", cached=False)
    state.update_stage("data", cached=True)
    again = RunState(home, "run-1")
    assert (again.status, again.record["pid"]) == ("running", 7)
    assert again.stage("data") == {"status": "finished", "cached": True}
    assert [path.name for path in home.run("run-1").iterdir()] == ["state.json"]


def test_a_value_that_is_no_json_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"status": "running"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"status": float("nan")})
    assert json.loads(path.read_text()) == {"status": "running"}


def test_half_a_file_reads_as_nothing(tmp_path):
    (tmp_path / "state.json").write_text('{"status": "run')
    assert read_json(tmp_path / "state.json") == {}


def test_an_identity_is_written_once(tmp_path):
    write_once(tmp_path / "run.json", {"seed": 0})
    write_once(tmp_path / "run.json", {"seed": 1})
    assert read_json(tmp_path / "run.json") == {"seed": 0}
