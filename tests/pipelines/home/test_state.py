"""state.json is whole at every moment, and a run's status changes as its table says."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pipelines.home.home import Home
from pipelines.home.state import RunState, write_once
from specs.machine.files import DiskError, read_json, write_json
from specs.machine.liveness import FINAL


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


class Lifetime(RuleBasedStateMachine):
    """A run that any command asks for, at any time: `rpg run`, `resume`, `submit`, `cancel`, `study run`, `evaluate`.

    To execute a run is to begin it, to do stages or find them cached, and to end it. Each rule reads the state again,
    like a separate process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.finished: dict[str, Any] = {}
        """State that must remain after the run's last finish; empty if it has not finished, or a stage was repeated
        since."""

    def teardown(self) -> None:
        self.directory.cleanup()

    @property
    def state(self) -> RunState:
        return RunState(Home(Path(self.directory.name)), "run-1")

    @rule(flow_run_id=st.sampled_from(["a", "b"]))
    def is_submitted(self, flow_run_id: str) -> None:
        self.state.submitted(flow_run_id, "http://127.0.0.1:4200/api")
        assert self.state.waits

    @rule(does=st.integers(0, 2), ending=st.sampled_from(["finished", "failed", "cancelled", "pending", "killed"]))
    def is_executed(self, does: int, ending: str) -> None:
        state = self.state
        state.begin(pid=7, flow_run_id="c")
        for _ in range(does):
            state.work()
            self.finished = {}
        if ending != "killed":
            state.end(ending, "as it was asked", cause=None)
        if ending == "finished" and not self.finished:
            self.finished = self.kept()
        assert ending == "killed" or self.state.record["pid"] is None

    @rule(ending=st.sampled_from(["failed", "cancelled", "pending"]))
    def is_ended_by_whoever_finds_it(self, ending: str) -> None:
        self.state.end(ending, "nobody executes it")
        assert not self.finished or not self.state.waits

    @invariant()
    def finished_work_stays_finished(self) -> None:
        assert self.state.status in ("pending", "running", *FINAL)
        if self.finished:
            assert self.kept() == self.finished
        else:
            assert self.state.status != "finished"

    def kept(self) -> dict[str, Any]:
        return {name: self.state.record.get(name) for name in ("status", "started_at", "ended_at", "cause")}


TestLifetime = Lifetime.TestCase
TestLifetime.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)


@pytest.mark.parametrize(("status", "cause"), [("failed", "disk_full"), ("cancelled", None), ("pending", None)])
def test_a_run_records_its_end_on_a_full_disk(
    tmp_path: Path, full_disk: Callable[..., None], status: str, cause: str | None
) -> None:
    home = Home(tmp_path / "disk" / "home")
    state = RunState(home, "run-1")
    state.begin(pid=7)
    full_disk()
    with pytest.raises(DiskError):
        state.update_stage("train", status="failed", reason="no space is left")
    state.end(status, "no space is left", cause=cause)
    again = RunState(home, "run-1").record
    assert (again["status"], again["cause"], again["pid"]) == (status, cause, None)
    assert again["stages"]["train"]["status"] == "failed", "what could not be written before is there too"
    assert [path.name for path in home.run("run-1").iterdir()] == ["state.json"]


def test_the_room_for_a_runs_end_is_freed_when_it_ends(tmp_path: Path) -> None:
    state = RunState(Home(tmp_path), "run-1")
    state.begin(pid=7)
    assert len(list(state.path.parent.iterdir())) == 2
    state.end("finished", "")
    assert list(state.path.parent.iterdir()) == [state.path]
