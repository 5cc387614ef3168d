"""Files that are written beside their name first."""

from pathlib import Path

import pytest

from specs.machine.files import create_json, read_json, replacing, write_json


def test_two_writers_of_one_process_number_do_not_meet(tmp_path: Path) -> None:
    # Two containers that share a directory have processes of one number, as these two writers have.
    path = tmp_path / "state.json"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


def test_a_file_is_created_once(tmp_path: Path) -> None:
    path = tmp_path / "0001.json"
    create_json(path, {"holder": "first"})
    with pytest.raises(FileExistsError):
        create_json(path, {"holder": "second"})
    assert read_json(path) == {"holder": "first"}
    write_json(path, {"holder": "third"})
    assert read_json(path) == {"holder": "third"}
    assert [file.name for file in tmp_path.iterdir()] == ["0001.json"]
