"""Checkpoints: whole or not there, verified before use, the last few kept; and a run's whole state of chance."""

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rpg.checkpoints.checkpoint import Checkpoints
from rpg.checkpoints.pieces import Piece, PieceFiles, StateCopy, copy_in_strips
from rpg.checkpoints.retention import Means, Retention
from rpg.run_recorder.state import random_states, restore_random_states
from specs.machine.fence import Fence, SupersededError, lease_file
from specs.machine.files import DiskError, write_json

WEIGHTS = "learner-rank00000.safetensors"


def state() -> StateCopy:
    taken = StateCopy()
    taken.pieces("learner", [Piece("weight", 0, torch.arange(3.0)), Piece("half", 4, torch.ones(1).bfloat16())])
    taken.document("trainer.json", {})
    return taken


def written(directory: Path, *steps: int, keep_last: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(directory, Retention(last=keep_last), Fence(directory, 0))
    for step in steps:
        checkpoints.write(step, state())
    checkpoints.wait()
    return checkpoints


def test_no_checkpoint_is_step_0(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", Retention(last=1), Fence(tmp_path / "none", 0)).latest() == 0


def test_one_that_is_not_published_is_not_there(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 5)
    killed = tmp_path / ".step-000006.partial"
    killed.mkdir()
    state().write(killed)
    assert checkpoints.latest() == 5
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"], "remains of a killed start are removed"


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 10, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000010"]


def test_those_of_certain_steps_and_the_best_are_kept_as_well(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, Retention(last=1, every=4, best="kl/reverse", mode="min"), Fence(tmp_path, 0))
    for step, divergence in ((2, 0.5), (3, 0.1), (4, 0.3), (6, 0.1), (7, 0.2), (8, 0.9), (9, 0.4)):
        checkpoints.write(step, state(), {"kl/reverse": divergence})
    checkpoints.wait()
    assert checkpoints.published() == [4, 6, 8, 9], "of two equally good ones the later"


def test_figures_are_means_since_the_checkpoint_before() -> None:
    means = Means()
    means.add({"reward/mean": 1.0, "only/once": 1.0})
    means.add({"reward/mean": 2.0})
    assert means.take() == {"reward/mean": 1.5}
    means.add({"reward/mean": 4.0})
    assert means.take() == {"reward/mean": 4.0}


def test_training_goes_on_while_a_checkpoint_is_written_and_its_state_is_that_of_the_copy(tmp_path: Path) -> None:
    checkpoints, weights, written = (
        Checkpoints(tmp_path, Retention(last=1), Fence(tmp_path, 0)),
        torch.zeros(4),
        threading.Event(),
    )
    copy = StateCopy()
    copy.pieces("learner", [Piece("weight", 0, weights)])
    write = copy.write
    copy.write = lambda directory: written.wait(60) and write(directory)
    checkpoints.write(1, copy)
    checkpoints.check()
    weights += 1
    assert checkpoints.published() == []
    written.set()
    checkpoints.wait()
    PieceFiles(checkpoints.path(1), "learner").fill(Piece("weight", 0, weight := torch.ones(4)))
    assert weight.tolist() == [0, 0, 0, 0]


def test_a_failure_to_write_comes_out_at_the_next_check_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoints, copy = written(tmp_path, 1), state()
    copy.document("/dev/full", {})
    checkpoints.write(2, copy)
    with pytest.raises(DiskError, match=r"cannot write .*000002.partial: no space is left on the device"):
        until_it_fails(checkpoints)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoints.latest() == 1
    checkpoints.write(3, state())
    checkpoints.wait()
    assert checkpoints.latest() == 3


def until_it_fails(checkpoints: Checkpoints) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        checkpoints.check()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1] + b"!"),
            f"{WEIGHTS} does not match its digest",
        ),
        (lambda path: (path / WEIGHTS).write_bytes(b"we"), f"{WEIGHTS} has 2 bytes instead of "),
        (lambda path: (path / "trainer.json").unlink(), "trainer.json is missing"),
        (lambda path: (path / "manifest.json").write_text('{"st'), "its manifest cannot be read"),
    ],
)
def test_a_broken_one_is_passed_over_aloud(
    tmp_path: Path, damage: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = written(tmp_path, 4, 8)
    damage(tmp_path / "step-000008")
    assert checkpoints.latest() == 4
    errors = capsys.readouterr().err
    assert "step-000008 is broken" in errors
    assert words in errors
    written(tmp_path, 10)
    assert Checkpoints(tmp_path, Retention(last=2), Fence(tmp_path, 0)).latest() == 10
    assert (tmp_path / "step-000004").exists(), "the broken one does not count among the last two"


def test_a_broken_one_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 4, 8)
    (tmp_path / "step-000008" / "trainer.json").unlink()
    checkpoints.write(8, state())
    checkpoints.wait()
    assert checkpoints.latest() == 8


def test_chance_goes_on_where_it_was(tmp_path: Path) -> None:
    torch.save(random_states(), tmp_path / "random.pt")
    drawn = (random.random(), np.random.rand(), torch.rand(3))
    restore_random_states(torch.load(tmp_path / "random.pt", weights_only=True))
    again = (random.random(), np.random.rand(), torch.rand(3))
    assert drawn[:2] == again[:2]
    assert torch.equal(drawn[2], again[2])


def test_a_trainer_that_lost_the_run_publishes_no_checkpoint_and_leaves_those_of_the_next_holder(tmp_path):
    def checkpoints(lease):
        return Checkpoints(tmp_path / "checkpoints", Retention(last=1), Fence(tmp_path, lease))

    lost, next_holder = checkpoints(1), checkpoints(2)
    lease_file(tmp_path, 2).parent.mkdir()
    lease_file(tmp_path, 2).write_text("{}")
    next_holder.write(3, StateCopy())
    next_holder.wait()
    lost.write(4, StateCopy())
    with pytest.raises(SupersededError):
        lost.wait()
    for act in (lost.latest, lambda: lost.delete_after(0)):
        with pytest.raises(SupersededError):
            act()
    assert next_holder.latest() == 3
    assert next_holder.published() == [3]


def test_a_checkpoint_that_got_its_name_after_the_run_was_taken_over_does_not_count(tmp_path, capsys):
    for number, (lease, resumed) in enumerate([(1, 0), (2, 4)], start=1):
        write_json(tmp_path / "attempts" / f"{number:04}.json", {"lease": lease, "resumed_from_step": resumed})
    for lease, steps in {1: (4, 8), 2: (6,)}.items():
        checkpoints = Checkpoints(tmp_path / "checkpoints", Retention(last=9), Fence(tmp_path, lease))
        for step in steps:
            checkpoints.write(step, StateCopy())
        checkpoints.wait()
    third = Checkpoints(tmp_path / "checkpoints", Retention(last=9), Fence(tmp_path, 3))
    assert (third.latest(), third.latest(up_to=5)) == (6, 4)
    assert (
        "step-000008 is broken (a trainer wrote it after another one had taken over the run)" in capsys.readouterr().err
    )


@pytest.mark.parametrize("count", [1, 6, 7, 14, 40])
def test_strips_arrive_in_their_places(count: int) -> None:
    source, target = torch.randn(count), torch.full((count,), torch.nan)
    copy_in_strips(source, target, [torch.empty(7), torch.empty(7)])
    assert torch.equal(target, source)
