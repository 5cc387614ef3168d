"""Answers of tools that do not depend only on their arguments: a killed run gets the same answers again.

The tool says random digits. It is held up in the middle of a step, where the trainer is killed.
"""

import json
import os
import signal
import sys
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from places import PACKAGES
from waiting import wait_for

from rpg.rollouters.journal import Answer, Journal, Kept
from tests.rpg.tiny_run import finish, make_run, rows, start

ROLLOUT: dict[str, Any] = {
    "max_response_length": 20,
    "rollouter": {
        "type": "tools",
        "tools": [{"type": "dice", "environment": ["ODD_TOOLS_NOTES"]}],
        "format": {"type": "tags", "call": "1{argument}=", "answer": "0{answer}="},
        "max_turns": 3,
        "answer_tokens": 6,
        "call_seconds": 600,
        "calls_at_once": 2,
    },
}
BY_PLACE = itemgetter("step", "rollout_id", "position")


def said(notes: Path) -> list[str]:
    return [file.read_text() for file in notes.glob("said-*")]


def of_attempt(run: Path, table: str, step: int, attempt: int) -> list[dict[str, Any]]:
    """Rows of a step, those of an attempt that a later one went through again too."""
    files = sorted((run / "segments" / table).glob("*.parquet"))
    found = [row for file in files for row in pq.read_table(file).to_pylist()]
    return [row for row in found if (row["step"], row["attempt"]) == (step, attempt)]


@pytest.mark.long
def test_a_step_that_a_kill_interrupts_hears_the_same_answers_again(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))
    notes = tmp_path / "notes"
    notes.mkdir()
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH")))),
        "ODD_TOOLS_NOTES": str(notes),
    }
    training = {
        "steps": 6,
        "group_size": 24,
        "optimizer": {"learning_rate": 1e-4},
        "checkpoint": {"every_steps": 4},
    }
    run = make_run(inputs, tmp_path / "run", rollout=ROLLOUT, training=training)
    (notes / "hold").write_text(str(run / "answers" / "000006"))
    process = start([sys.executable, "-m", "rpg.train", str(run)], environment)
    wait_for(lambda: (notes / "reached").exists() or process.poll() is not None, timeout=600, what="the answer")
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    finish(process, expect=-signal.SIGKILL)
    (notes / "hold").unlink()

    kept = {
        step: [
            json.loads(line)
            for file in (run / "answers" / f"{step:06}").glob("*")
            for line in file.read_text().splitlines()
        ]
        for step in (5, 6)
    }
    assert sorted(int(path.name) for path in (run / "answers").iterdir()) == [5, 6]
    assert len(kept[5]) > 5
    assert len(kept[6]) >= 4
    before = len(said(notes))
    assert "resumes after step 4" in finish(start([sys.executable, "-m", "rpg.train", str(run)], environment))
    first, again = (
        {table: of_attempt(run, table, 5, attempt) for table in ("tokens", "turns", "rollouts")} for attempt in (1, 2)
    )
    for table, its_rows in first.items():
        assert len(its_rows) == len(again[table]) > 0
        for one, other in zip(its_rows, again[table], strict=True):
            assert {**one, "attempt": 2, "seconds": None} == {**other, "seconds": None}
    given = [row for row in rows(run, "turns") if row["step"] == 6 and not row["sampled"]]
    answers = [answer[1] for *_, entry in kept[6] for answer in entry]
    told = Counter(row["text"][1:-1] for row in given)
    cut = sum(row["finish_reason"] == "length" for row in rows(run, "rollouts") if row["step"] == 6)
    assert (Counter(answers) - told).total() <= cut  # an answer that leaves no room for another turn is not given
    assert 0 < len(said(notes)) - before <= len(given) + cut - len(answers)
    assert not (run / "answers").exists()


FIVE = Kept((Answer("dice", "5"),), pause=9)


def test_an_entry_counts_behind_the_same_tokens_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "answers")
    prompt = journal.of_prompt(3, seed=7)
    prompt.keep(0, 1, (1, 2), FIVE)
    prompt.sync()
    journal.close()
    again = Journal(tmp_path / "answers").of_prompt(3, seed=7)
    assert again.recall(0, 1, (1, 2)) == FIVE
    others = [(again, (1, 1, (1, 2))), (again, (0, 2, (1, 2))), (again, (0, 1, (1, 3)))]
    others += [(again.journal.of_prompt(*other), (0, 1, (1, 2))) for other in ((4, 7), (3, 8))]
    assert [prompt.recall(*place) for prompt, place in others] == [None] * 5


def test_a_line_that_a_kill_cut_off_does_not_count(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "answers")
    for member in range(2):
        journal.of_prompt(3, seed=7).keep(member, 1, (1,), FIVE)
    journal.close()
    (file,) = (tmp_path / "answers" / "000003").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    again = Journal(tmp_path / "answers").of_prompt(3, seed=7)
    assert [again.recall(member, 1, (1,)) for member in range(2)] == [FIVE, None]


def test_steps_that_a_checkpoint_stands_for_are_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "answers")
    for step in (3, 4, 5):
        journal.of_prompt(step, seed=7).keep(0, 1, (1,), FIVE)
    journal.forget(4, delete=True)
    assert [path.name for path in (tmp_path / "answers").iterdir()] == ["000005"]
    journal.forget(5, delete=True)
    assert not (tmp_path / "answers").exists()
