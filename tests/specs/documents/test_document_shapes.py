"""A document of the record: the parts that fit are read, the others are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from specs.documents.reading import read_checked

SHA = {"sha256": "00"}
UNIT = {"run_id": "a-0", "seed": 0}


@pytest.mark.parametrize(
    ("name", "document", "read", "problems"),
    [
        ("progress.json", {"step": 1, "more": [1]}, {"step": 1, "more": [1]}, []),
        ("run.json", {"seed": None, "name": "a"}, {"name": "a"}, []),
        ("run.json", {"seed": True}, {}, ["seed: true or false; expected a whole number"]),
        ("run.json", {"seed": 1.0}, {}, ["seed: a number; expected a whole number"]),
        ("run.json", {"run_id": "../a"}, {}, ["run_id: '../a'; expected a name"]),
        ("run.json", {"objective": 1}, {}, ["objective: a whole number; expected a text or an object"]),
        ("state.json", {"started_at": "2026-11-20"}, {}, ["started_at: '2026-11-20'; expected a time with its zone"]),
        (
            "study.json",
            {"trials": [{"number": 0}, {"state": "done"}, 3, {"number": 4, "value": 1}]},
            {"trials": [{"number": 0}, {"number": 4, "value": 1}]},
            ["trials[1]: an object; expected an object with number", "trials[2]: a whole number; expected an object"],
        ),
        (
            "study.json",
            {"confirmation": {"arms": [{"units": [UNIT, "x"]}]}},
            {"confirmation": {"arms": [{"units": [UNIT]}]}},
            ["confirmation.arms[0].units[1]: 'x'; expected an object"],
        ),
        (
            "freed.json",
            {"tokens": {"keep_days": "1", "freed_at": "x"}, "events": {"keep_days": 1, "freed_at": "x"}},
            {"events": {"keep_days": 1, "freed_at": "x"}},
            ["tokens.keep_days: '1'; expected a number", "tokens: an object; expected an object with keep_days"],
        ),
        (
            "provenance.json",
            {"origins": [[["seeds"], "file", None, 1], [["seeds"], "file"], "x"]},
            {"origins": [[["seeds"], "file", None, 1]]},
            ["origins[1]: a list; expected a longer list", "origins[2]: 'x'; expected a list"],
        ),
        ("manifest.json", {"files": {"a": SHA, "b": "00"}}, {"files": {"a": SHA, "b": "00"}}, []),
        ("manifest.json", {"files": {"a": SHA, "b": None}}, {}, ["files.b: null; expected an object or a text"]),
        ("experiment.json", {"runs": [1] * 10_001}, {}, ["10001 parts of another type"]),
        ("experiment.json", {"runs": [1] * 1_000_001}, {}, ["more than 1000000 values"]),  # gigabytes if it is parsed
        ("provenance.json", {"origins": [[]] * 10_001}, {}, ["10001 parts of another type"]),  # one each
    ],
)
def test_the_parts_that_fit_are_read_and_the_others_are_named(
    tmp_path: Path, name: str, document: Any, read: Any, problems: list[str]
) -> None:
    (tmp_path / name).write_text(json.dumps(document))
    assert read_checked(tmp_path / name) == (read, problems)
