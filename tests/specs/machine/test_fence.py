"""A trainer whose run was taken over while it did not execute wakes up, writes nothing, and says why it ends."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from rpg.recording.run_directory import RunDirectory
from specs.machine.fence import Fence, SupersededError, lease_file
from specs.machine.files import read_json, write_json
from specs.machine.standstill import SIGN
from tests.rpg.tiny_run import finish, make_inputs, make_run, rows, start, train

CHANGES: dict[str, Any] = {"training": {"steps": 10, "checkpoint": {"every_steps": 2}}}


def hold(run_dir: Path, lease: int) -> None:
    """A process takes the run, and hands the lease to the trainer that it is about to start."""
    lease_file(run_dir, lease).parent.mkdir(exist_ok=True)
    lease_file(run_dir, lease).write_text("{}")
    write_json(run_dir / "inputs.json", read_json(run_dir / "inputs.json") | {"lease": lease})


def published(run_dir: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file that has its final name; the sign of work is none of the record."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.name != SIGN)
    named = (path for path in files if not any(part.startswith(".") for part in path.relative_to(run_dir).parts))
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in named}


def reproducible(run_dir: Path) -> list[Any]:
    """Every metric but those of times, rates and memory."""
    timed = ("time/", "tokens_per_second/", "memory/")
    metrics = [(row["step"], row["name"], row["value"]) for row in rows(run_dir, "metrics")]
    return sorted(metric for metric in metrics if not metric[1].startswith(timed))


@pytest.mark.long
def test_a_trainer_that_wakes_up_after_its_run_was_taken_over_writes_nothing(tmp_path: Path) -> None:
    make_inputs(tmp_path / "inputs")
    undisturbed = make_run(tmp_path / "inputs", tmp_path / "undisturbed" / "run", **CHANGES)
    train(undisturbed)
    run_dir = make_run(tmp_path / "inputs", tmp_path / "taken" / "run", **CHANGES)
    hold(run_dir, 1)
    paused = start([sys.executable, "-m", "rpg.train", str(run_dir)])
    try:
        wait_for(lambda: paused.poll() is not None or read_json(run_dir / "progress.json").get("step", 0) >= 3)
        assert paused.poll() is None
        paused.send_signal(signal.SIGSTOP)
        hold(run_dir, 2)
        train(run_dir)
        before = published(run_dir)
        paused.send_signal(signal.SIGCONT)
    except BaseException:
        paused.kill()
        raise
    message = finish(paused, expect=1)
    assert message.splitlines()[-1] == "train: run was taken over (lease 1 is superseded): nothing more is written"
    assert published(run_dir) == before
    attempts = [json.loads(path.read_text()) for path in sorted((run_dir / "attempts").glob("*.json"))]
    assert [(attempt["attempt"], attempt["lease"]) for attempt in attempts] == [(1, 1), (2, 2)]
    assert reproducible(run_dir) == reproducible(undisturbed)


def test_a_trainer_that_lost_the_run_begins_no_attempt_and_takes_no_number_of_another(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lease_file(tmp_path, 1).parent.mkdir()
    lease_file(tmp_path, 1).write_text("{}")
    assert [run.new_attempt(0, Fence(tmp_path, 1)), run.new_attempt(4, Fence(tmp_path, 1))] == [1, 2]
    lease_file(tmp_path, 2).write_text("{}")
    with pytest.raises(SupersededError):
        run.new_attempt(0, Fence(tmp_path, 1))
    assert [run.new_attempt(2, Fence(tmp_path, 2)), run.new_attempt(0, Fence(tmp_path, 0))] == [3, 4]
    assert read_json(tmp_path / "attempts" / "0003.json")["resumed_from_step"] == 2
