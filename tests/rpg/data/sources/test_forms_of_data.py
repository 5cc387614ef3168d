"""Forms in which people keep problems: saved datasets, packed files, floats of whole numbers, more keys of messages."""

import gzip
import json
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rpg.data.problems import SourceProblem
from rpg.data.prompts import staged
from specs.errors import Issue, SpecError
from specs.schema.data import ChatPrompt, Source

ROWS = [{"prompt": f"{number} + 1", "answer": str(number + 1)} for number in range(9)]
ANSWER = {"answer": "answer"}


def read(**fields: Any) -> list[SourceProblem]:
    return list(Source.model_validate({"columns": ANSWER, **fields}).read())


def wrong(**fields: Any) -> Issue:
    with pytest.raises(SpecError) as caught:
        read(**fields)
    return caught.value.issues[0]


def jsonl(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def one(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(path))


def two_files(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(path), num_shards=2)


def splits(path: Path) -> None:
    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(str(path))


@pytest.mark.parametrize("save", [one, two_files, splits])
def test_a_directory_of_save_to_disk_is_read(save: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path / "saved")
    problems = read(source="hub", path=str(tmp_path / "saved"))
    assert [(each.prompt, each.answer) for each in problems] == [(row["prompt"], row["answer"]) for row in ROWS]
    assert problems[1].where == "saved, row 2"
    source = Source.model_validate({"source": "hub", "path": str(tmp_path / "saved"), "columns": ANSWER})
    assert [each.prompt for each in source.peek(2)] == ["0 + 1", "1 + 1"]


def test_a_split_that_was_not_saved_names_those_that_were(tmp_path: Path) -> None:
    splits(tmp_path / "several")
    issue = wrong(source="hub", path=str(tmp_path / "several"), split="validation")
    assert (issue.path, issue.given, issue.allowed) == (("split",), "validation", "train, test")
    assert len(read(source="hub", path=str(tmp_path / "several"), split="test")) == 1
    one(tmp_path / "one")
    assert wrong(source="hub", path=str(tmp_path / "one"), split="test").path == ("split",)


def test_a_saved_dataset_that_is_damaged_is_refused_with_what_to_do(tmp_path: Path) -> None:
    one(tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).write_bytes(b"no rows")
    issue = wrong(source="hub", path=str(tmp_path / "saved"))
    assert issue.message.startswith("the saved dataset cannot be read: ")
    assert "source: parquet" in issue.hint


def test_a_directory_in_the_place_of_a_file_is_told_of_the_source_that_reads_it(tmp_path: Path) -> None:
    one(tmp_path / "saved")
    for kind in ("jsonl", "parquet", "csv"):
        assert "source: hub" in wrong(source=kind, path=str(tmp_path / "saved")).hint


def test_a_packed_file_of_lines_is_read(tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    problems = read(source="jsonl", path=str(file))
    assert [each.answer for each in problems] == [row["answer"] for row in ROWS]
    assert problems[0].dataset == "sums"
    file.write_bytes(file.read_bytes()[:-20])
    assert wrong(source="jsonl", path=str(file)).message.startswith("sums.jsonl.gz cannot be unpacked")


@pytest.mark.more
def test_a_packed_file_that_unfolds_too_far_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bomb.jsonl.gz"
    file.write_bytes(gzip.compress(b"\n" * 9_000_000))
    assert "values in a file of" in wrong(source="jsonl", path=str(file)).message


@pytest.mark.parametrize(
    ("value", "answer"), [("72.0", "72"), ("-3.0", "-3"), ("0.5", "0.5"), ("1e21", "1" + "0" * 21)]
)
def test_a_float_that_is_a_whole_number_is_its_number(value: str, answer: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", f'{{"prompt": "?", "answer": {value}}}')
    assert [each.answer for each in read(source="jsonl", path=path)] == [answer]


def test_a_column_of_numbers_with_gaps_has_whole_answers(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["How many?", "And now?"], "answer": pa.array([72.0, 18.0])})
    pq.write_table(table, tmp_path / "f.parquet")
    assert [each.answer for each in read(source="parquet", path=str(tmp_path / "f.parquet"))] == ["72", "18"]


@pytest.mark.parametrize("source", ["parquet", "hub"])
@pytest.mark.parametrize(
    ("values", "answers"),
    [
        (pa.array([0.1, 72, 16777216, 1e-7], pa.float32()), ["0.1", "72", "16777216", "1e-07"]),
        (
            pa.array([Decimal("72.00"), Decimal("0.50"), Decimal("-1e9")], pa.decimal128(12, 2)),
            ["72", "0.5", "-1000000000"],
        ),
    ],
)
def test_a_number_of_a_column_keeps_its_digits(
    source: str, values: Any, answers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "d").mkdir()
    structs = pa.StructArray.from_arrays([values], names=["gold"])
    table = pa.table({"prompt": [f"{index}?" for index in range(len(values))], "answer": values, "in": structs})
    pq.write_table(table, tmp_path / "d" / "train.parquet")
    path = str(tmp_path / "d" / ("train.parquet" if source == "parquet" else ""))
    for column in ("answer", "in.gold"):
        found = read(source=source, path=path, columns={"answer": column})
        assert [each.answer for each in found] == answers


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("NaN", "NaN, which JSON does not have; write null or a text"),
        ("Infinity", "Infinity, which JSON does not have; write null or a text"),
        ("-Infinity", "-Infinity, which JSON does not have; write null or a text"),
        ("1e999", "1e999, which is too large for a float"),
    ],
)
def test_a_number_that_is_not_finite_is_no_json(value: str, reason: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", f'{{"prompt": "?", "answer": {value}}}')
    assert wrong(source="jsonl", path=path).message == f"d.jsonl, line 1: {reason}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_no_answer(value: float, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["?"], "answer": [value]}), tmp_path / "f.parquet")
    issue = wrong(source="parquet", path=str(tmp_path / "f.parquet"))
    assert issue.message == "f.parquet, row 1: `answer` holds no answer"
    assert issue.allowed == "text or a finite number"


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
MESSAGES = [
    {"role": "user", "content": "1 + 1?", "think": True},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I add."},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
]


def staged_messages(problem: SourceProblem) -> Any:
    return json.loads(staged(problem, ChatPrompt()).prompt)


def test_all_keys_of_messages_reach_the_template(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", json.dumps({"prompt": MESSAGES, "answer": "2"}))
    (problem,) = read(source="jsonl", path=path)
    assert staged_messages(problem) == MESSAGES


def test_fields_that_a_parquet_file_fills_with_null_are_left_out(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": MESSAGES, "answer": "2"}]), tmp_path / "d.parquet")
    (problem,) = read(source="parquet", path=str(tmp_path / "d.parquet"))
    assert staged_messages(problem) == MESSAGES


def test_a_call_of_a_tool_needs_no_content(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    path = jsonl(tmp_path / "d.jsonl", json.dumps({"prompt": [MESSAGES[0], called, MESSAGES[2]], "answer": "2"}))
    (problem,) = read(source="jsonl", path=path)
    assert staged_messages(problem)[1] == called | {"content": ""}


def test_problems_that_differ_in_a_flag_alone_are_two() -> None:
    def problem(**keys: Any) -> SourceProblem:
        return SourceProblem([{"role": "user", "content": "1 + 1?", **keys}], "2", "d")

    ids = [staged(each, ChatPrompt()).problem_id for each in (problem(), problem(think=True), problem(think=False))]
    assert len({*ids}) == 3
    assert ids[0] == staged(SourceProblem("1 + 1?", "2", "d"), ChatPrompt()).problem_id
