"""A stage whose ranks all stand still ends with their stacks; one in which a single rank works continues."""

import os
import sys
from pathlib import Path

import pytest

from specs.machine.exit_cause import noted_exits
from specs.machine.standstill import SIGN, _looks_without_work, show_work
from tests.rpg.tiny_run import finish, start


@pytest.mark.more
def test_a_rank_waits_as_long_as_another_works_and_a_deadlock_ends_with_all_stacks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.rpg.standstill_worker", str(tmp_path), str(tmp_path / "store"), "3"]
    processes = [start(command, environment={"RANK": str(rank)}) for rank in range(2)]
    waiting, absent = (finish(process, expect=1, seconds=60) for process in processes)
    for output in (waiting, absent):
        assert output.startswith("met\n"), "the first exchange was late, and no standstill"
        assert "no rank has worked for 3 s" in output
    assert "in gather" in waiting
    assert "in elsewhere" in absent
    assert "hung" in [end.cause for end in noted_exits(tmp_path)], "the second to end may only miss the first"


def test_only_looks_count_that_find_no_sign_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign = tmp_path / SIGN
    monkeypatch.setenv("RPG_SIGN_OF_WORK", str(sign))
    show_work()
    assert not sign.exists(), "no stage runs here"
    sign.touch()
    looks = _looks_without_work(sign, 0.0)
    assert [next(looks) for _ in range(3)] == [0, 1, 2]
    os.utime(sign, (1.0, 1.0))
    assert [next(looks) for _ in range(2)] == [0, 1]
    sign.unlink()
    assert next(looks) == 2
