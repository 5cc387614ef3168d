"""A published result is whole or not there."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from pipelines.home.home import Home
from pipelines.home.results import check_results, damage_of, filling, publish

MANIFEST = {"stage": "data", "fingerprint": "f" * 64, "identity": {}, "inputs": {}}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    output = tmp_path / "artifacts" / "data" / "ffff"
    with filling(output) as aside:
        (aside / "train").mkdir()
        (aside / "train" / "part.txt").write_text("abc")
        publish(aside, output, MANIFEST)
    return output


def test_a_published_directory_verifies(output):
    assert damage_of(output / "manifest.json", "f" * 64) == ""
    assert sorted(path.name for path in output.parent.iterdir()) == ["ffff"]


def test_changed_content_of_the_same_size_is_found(output):
    (output / "train" / "part.txt").write_text("abd")
    assert damage_of(output / "manifest.json", "f" * 64) == "train/part.txt does not match its digest"


def test_a_truncated_file_is_found(output):
    (output / "train" / "part.txt").write_text("ab")
    assert damage_of(output / "manifest.json", "f" * 64) == "train/part.txt has 2 bytes instead of 3"


def test_a_missing_file_is_found(output):
    (output / "train" / "part.txt").unlink()
    assert damage_of(output / "manifest.json", "f" * 64) == "train/part.txt is missing"


def test_a_manifest_of_another_fingerprint_does_not_count(output):
    assert damage_of(output / "manifest.json", "0" * 64) == "manifest.json is missing or has another fingerprint"


def test_publishing_again_replaces_what_was_damaged(output):
    (output / "train" / "part.txt").write_text("ab")
    with filling(output) as aside:
        (aside / "new.txt").write_text("new")
        publish(aside, output, MANIFEST)
    assert damage_of(output / "manifest.json", "f" * 64) == ""
    assert not (output / "train").exists()


def test_a_failure_while_filling_leaves_nothing(tmp_path):
    output = tmp_path / "data" / "ffff"
    with pytest.raises(OSError, match="disk full"):
        _fail_half_way(output)
    assert list(output.parent.iterdir()) == []


def test_what_a_killed_process_left_half_filled_is_swept(tmp_path):
    output = tmp_path / "data" / "ffff"
    left = output.parent / ".ffff.4711.1"
    left.mkdir(parents=True)
    with filling(output) as aside:
        assert not left.exists()
        publish(aside, output, MANIFEST)


def test_a_lock_makes_the_second_process_wait_for_the_first(tmp_path):
    home, waited = Home(tmp_path), []
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, held))
    holder.start()
    assert held.wait(30)
    with home.locked("data-1", waiting=lambda: waited.append(time.monotonic())):
        assert waited
    holder.join()
    assert holder.exitcode == 0


def test_a_lock_is_refused_at_once_where_waiting_raises(tmp_path):
    home = Home(tmp_path)

    asked: list[int] = []

    def refuse() -> None:
        asked.append(1)
        raise BlockingIOError

    with home.locked("run-1", waiting=refuse):
        with pytest.raises(BlockingIOError), home.locked("run-1", waiting=refuse):
            pass
        assert len(asked) == 1
    with home.locked("run-1", waiting=refuse):
        pass


def test_a_check_names_each_damaged_result_by_its_place(output, tmp_path):
    home = Home(tmp_path)
    evaluation, being_filled = (tmp_path / "runs" / "a-1" / "evaluate" / name for name in ("eeee", ".eeee.1.2"))
    for directory in (evaluation, being_filled):
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text('{"fingerprint": "e", "files": {"gone": "0"}}')
    assert list(check_results(home)) == ["runs/a-1/evaluate/eeee: gone is missing"]
    (output / "train" / "part.txt").write_text("abd")
    assert next(check_results(home)) == "artifacts/data/ffff: train/part.txt does not match its digest"


def _fail_half_way(output: Path) -> None:
    with filling(output) as aside:
        (aside / "half.txt").write_text("half")
        raise OSError("disk full")


def _hold(root: Path, held) -> None:
    with Home(root).locked("data-1", waiting=lambda: os._exit(3)):
        held.set()
        time.sleep(1.2)
