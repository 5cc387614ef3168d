"""Files of data that unfold to far more than their size: each is refused in one issue, before memory is spent."""

import json
import resource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_bombs import Column, write

from pipelines.cli.own_spec import _read as read_own_file
from rpg.data import staging
from rpg.data.staging import first_problems, stage
from specs.errors import Issue, SpecError
from specs.machine.foreign import tables
from specs.schema.data import Data

N = 67_000_000
COLUMNS = {"prompt": "prompt", "answer": "answer"}


def bomb(path: Path, kind: str) -> Path:
    text, number = Column("prompt", b"1+1", N), Column("answer", 2, N)
    few = Column("prompt", b"1+1", 5), Column("answer", 2, 5)
    match kind:
        case "many rows":
            return write(path, text, number, rows=N)
        case "claims of billions":
            return write(path, *few, rows=10**12)
        case "one long list":
            return write(path, Column("prompt", b"1+1", N, repeated=True), Column("answer", 2, 1), rows=1)
        case "a list that is longer than it says":
            return write(path, Column("prompt", b"1+1", 2**29, repeated=True, claims=1), Column("answer", 2, 1), rows=1)
        case "pages that unfold":
            return write(
                path, Column("prompt", bytes(2 << 20), 4096, compressed=True), Column("answer", 2, 4096), rows=4096
            )
        case "values that are repeated":
            return write(path, Column("prompt", b"1" * 100_000, 400_000), Column("answer", 2, 400_000), rows=400_000)
    raise AssertionError(kind)


BOMBS = {
    "many rows": f"{2 * N} values in a file of",
    "claims of billions": "1000000000000 values in a file of",
    "one long list": f"{N + 1} values in a file of",
    "a list that is longer than it says": "reading it takes more than 2 GiB of memory",
    "pages that unfold": "reading it takes more than 2 GiB of memory",
    "values that are repeated": "decompressed bytes in a file of",
}


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are a part of the product's, so that the tests take a part of the time."""
    monkeypatch.setattr(tables, "_FREE_MEMORY", 2 << 30)
    monkeypatch.setattr(tables, "_FREE_BYTES", 1 << 28)


def sources(path: Path, **train: Any) -> Data:
    row = {"prompt": "2+2", "answer": 4}
    (path.parent / "own.jsonl").write_text(json.dumps(row))
    evaluation = {"source": "jsonl", "path": str(path.parent / "own.jsonl"), "columns": COLUMNS, "name": "own"}
    return Data.model_validate(
        {"train": [{"path": str(path), "columns": COLUMNS, **train}], "evaluation": [evaluation]}
    )


def wrong(path: Path, **train: Any) -> Issue:
    """The issue of the first look at the data."""
    data = sources(path, **train)
    with pytest.raises(SpecError) as caught:
        first_problems(data.train[0], data, ("data", "train", 0), 64)
    (issue,) = caught.value.issues
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    return issue


@pytest.mark.more
@pytest.mark.parametrize("kind", BOMBS)
def test_a_parquet_file_that_unfolds_too_far_is_refused_at_its_path(tmp_path: Path, kind: str) -> None:
    file = bomb(tmp_path / "bomb.parquet", kind)
    assert file.stat().st_size < 110_000
    issue = wrong(file, source="parquet")
    assert issue.path == ("data", "train", 0, "path")
    assert BOMBS[kind] in issue.message
    assert str(file) in issue.given
    if "memory" not in issue.message:
        with pytest.raises(SpecError, match=r"in a file of"):
            stage(sources(file, source="parquet"), tmp_path)
    if "decompressed bytes" not in issue.message and "memory" not in issue.message:
        with pytest.raises(SpecError, match=r"cannot be read as parquet: .* values in a file of"):
            read_own_file(file, "")


@pytest.mark.parametrize("kind", ["many rows", "claims of billions"])
def test_a_directory_that_holds_such_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "set").mkdir()
    file = bomb(tmp_path / "set" / "train.parquet", kind)
    data = sources(tmp_path / "set", source="hub")
    with pytest.raises(SpecError) as caught:
        stage(data, tmp_path)
    (issue,) = caught.value.issues
    assert BOMBS[kind] in issue.message
    assert issue.given == str(file)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_line_without_an_end_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(tables, "LONGEST_LINE", 1 << 16)
    file = tmp_path / f"data.{kind}"
    first = '{"prompt": "1+1", "answer": 2}' if kind == "jsonl" else "prompt,answer\n1+1,2"
    file.write_text(f"{first}\n" + '["' * (1 << 17))
    number = 2 if kind == "jsonl" else 3
    issue = wrong(file, source=kind)
    assert issue.message == f"data.{kind}, line {number} is longer than 65536 bytes"
    with pytest.raises(SpecError, match="is longer than 65536 bytes"):
        read_own_file(file, "")


def test_a_line_that_takes_a_hundred_times_its_bytes_as_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "allowed_memory", lambda _size: 64 << 20)
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "1+1", "answer": [' + "[]," * (1 << 23) + "0]}\n")
    assert "reading it takes more than" in wrong(file, source="jsonl").message


def test_honest_files_are_read_whole_repetitive_ones_too(tmp_path: Path) -> None:
    rows = 60_000
    table = {"prompt": pa.array(["the same question"] * rows), "answer": pa.array([7] * rows)}
    pq.write_table(pa.table(table), tmp_path / "data.parquet", compression="zstd")
    data = sources(tmp_path / "data.parquet", source="parquet")
    stage(data.model_copy(update={"deduplicate": True}), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["train"]["sets"][0]["read"] == rows
