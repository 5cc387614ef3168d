"""Whether a directory's files are those of its manifest: hashing, trust in recorded digests, and detected changes."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from specs.machine import manifests
from specs.machine.manifests import NOTES, find_damage, list_files

LONG_AGO = time.time_ns() - 10**12
FLIPPED = "large does not match its digest"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A large file and a small one, neither written just now."""
    for name, content in (("large", bytes(9 * 2**20)), ("small", b"abc")):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, ns=(LONG_AGO, LONG_AGO))
    return tmp_path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed from here on."""
    names: list[str] = []
    digest = manifests.digest
    monkeypatch.setattr(manifests, "digest", lambda path: names.append(path.name) or digest(path))
    return names


def flip(file: Path) -> None:
    """Changes the last byte; the size stays."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def entries_of(directory: Path) -> dict[str, Any]:
    return list_files(directory, ["large", "small"])


def test_a_file_hashed_once_is_not_hashed_again_until_it_changes(directory: Path, hashed: list[str]) -> None:
    entries = entries_of(directory)
    assert entries["small"] == {
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",  # of "abc", FIPS 180-2
        "bytes": 3,
    }
    hashed.clear()
    assert find_damage(directory, entries) == ""
    assert hashed == []
    flip(directory / "large")
    assert find_damage(directory, entries) == FLIPPED
    assert hashed == ["large"]


def test_without_notes_files_are_hashed_and_noted(directory: Path, hashed: list[str]) -> None:
    bare = {name: entry["sha256"] for name, entry in entries_of(directory).items()}
    (directory / NOTES).unlink()
    hashed.clear()
    assert find_damage(directory, bare) == ""
    assert hashed == ["large", "small"]
    assert find_damage(directory, bare) == ""
    assert hashed == ["large", "small"]


@pytest.mark.parametrize("content", ["", "[1]", '{"large": 7}', '{"large": [1, 2]}'])
def test_notes_that_are_no_notes_are_not_believed(directory: Path, content: str) -> None:
    entries = entries_of(directory)
    (directory / NOTES).write_text(content)
    flip(directory / "large")
    assert find_damage(directory, entries) == FLIPPED


def test_what_changed_behind_size_and_time_is_found_in_full_and_known_from_then_on(directory: Path) -> None:
    entries = entries_of(directory)
    flip(directory / "large")
    os.utime(directory / "large", ns=(LONG_AGO, LONG_AGO))
    assert find_damage(directory, entries) == ""
    assert find_damage(directory, entries, full=True) == FLIPPED
    assert find_damage(directory, entries) == FLIPPED


def test_a_check_in_full_writes_nothing_into_a_directory(directory: Path) -> None:
    entries = entries_of(directory)
    (directory / NOTES).unlink()
    assert find_damage(directory, entries, full=True) == ""
    assert not (directory / NOTES).exists()


def test_a_file_written_just_now_is_hashed_again(directory: Path, hashed: list[str]) -> None:
    now = time.time_ns()
    os.utime(directory / "small", ns=(now, now))
    entries = entries_of(directory)
    assert list(json.loads((directory / NOTES).read_text())) == ["large"]
    hashed.clear()
    assert find_damage(directory, entries) == ""
    assert hashed == ["small"]


def test_a_directory_that_cannot_be_written_to_is_hashed_once_in_a_process(directory: Path, hashed: list[str]) -> None:
    entries = entries_of(directory)
    (directory / NOTES).unlink()
    (directory / NOTES).mkdir()  # for root every directory can be written to, but no file takes a directory's place
    hashed.clear()
    for _ in range(2):
        assert find_damage(directory, entries) == ""
    assert hashed == ["large", "small"]
    flip(directory / "large")
    assert find_damage(directory, entries) == FLIPPED


def test_a_copy_with_new_times_is_hashed_again_and_a_damaged_copy_is_found(directory: Path, tmp_path: Path) -> None:
    entries = entries_of(directory)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("large", "small", NOTES):
        (copy / name).write_bytes((directory / name).read_bytes())
    assert find_damage(copy, entries) == ""
    flip(copy / "large")
    assert find_damage(copy, entries) == FLIPPED


def test_a_missing_and_a_truncated_file_are_named(directory: Path) -> None:
    entries = entries_of(directory)
    (directory / "small").write_bytes(b"ab")
    assert find_damage(directory, entries) == "small has 2 bytes instead of 3"
    (directory / "large").unlink()
    assert find_damage(directory, entries) == "large is missing"


def test_the_notes_are_never_among_the_files(directory: Path) -> None:
    (directory / NOTES).write_text("{}")
    assert set(list_files(directory, ["large", "small", NOTES])) == {"large", "small"}


def test_a_directory_that_is_removed_meanwhile_stays_away(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entries = list_files(directory, ["large", "small"])
    (directory / NOTES).unlink()
    digest = manifests.digest

    def remove_after(path: Path) -> str:
        sha256 = digest(path)
        directory.rename(tmp_path.with_name(f"{tmp_path.name}-removed"))
        return sha256

    monkeypatch.setattr(manifests, "digest", remove_after)
    assert find_damage(directory, entries) == "small is missing"
    assert not directory.exists()
