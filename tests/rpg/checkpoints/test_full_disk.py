"""A disk that is full ends training with a message; nothing half written counts; with room again the run continues."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpg.checkpoints.checkpoint import defect
from tests.rpg.tiny_run import make_inputs, make_run, rows, train

STEPS = 6
TRAINING = {"steps": STEPS, "checkpoint": {"every_steps": 1}}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.more
@pytest.mark.parametrize(("room", "what"), [(16_000, "segments"), pytest.param(900_000, "", marks=pytest.mark.long)])
def test_a_run_survives_a_full_disk(tmp_path: Path, small_disk: Path, room: int, what: str) -> None:
    make_inputs(tmp_path)
    run_dir = make_run(tmp_path, small_disk / "run", training=TRAINING)
    filler = small_disk / "filler"
    fill(filler, leave=room)
    output = train(run_dir, expect=1)
    assert "no space is left on the device; after fixing that, `rpg resume` continues" in output
    assert f"{run_dir}/{what}" in output
    assert "Traceback" not in output
    assert not list(run_dir.rglob(".*.partial"))
    saved = sorted((run_dir / "checkpoints").glob("step-*"))
    assert all(not defect(checkpoint) for checkpoint in saved)
    filler.unlink()
    output = train(run_dir)
    assert f"{'resumes after' if saved else 'begins at'} step {len(saved)}" in output
    assert sorted(row["step"] for row in rows(run_dir, "metrics") if row["name"] == "reward/mean") == [*range(1, 7)]
    recorded = [(row["step"], row["rollout_id"]) for row in rows(run_dir, "rollouts")]
    assert len(recorded) == len(set(recorded)) == STEPS * 32
    assert json.loads((run_dir / "train.json").read_text())["steps"] == STEPS


def fill(path: Path, *, leave: int) -> None:
    """A file that leaves this many bytes of its file system free."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(file.tell() - leave)
