"""GPU slots: two runs never hold one, and nothing is left of a run that was killed."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.launchers.ranks import verdict
from rpg.processes.gpu_slots import DIRECTORY, SLOTS, TooFewSlotsError, leased, slots_here, slots_wanted

HOLD = """
import sys, time
from rpg.processes.gpu_slots import leased
with leased(int(sys.argv[1]), sys.argv[2], waiting=None) as slots:
    print(*slots, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def four_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOTS, "0,1,2,3")
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "slots"))


def hold(count: int, holder: str) -> tuple["subprocess.Popen[str]", list[str]]:
    """A process that holds slots until it is killed, and which it got."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(count), holder], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_two_runs_get_slots_of_their_own_and_a_third_is_told_who_has_them() -> None:
    first, got_first = hold(1, "run-a")
    second, got_second = hold(2, "run-b")
    try:
        assert got_first == ["0"]
        assert got_second == ["1", "2"]
        with pytest.raises(TooFewSlotsError) as refused, leased(2, "run-c", waiting=None):
            pass
        assert f"0 is held by run-a (process {first.pid} of " in str(refused.value)
        assert "2 is held by run-b" in str(refused.value)
        with leased(1, "run-c", waiting=None) as left:
            assert left == ["3"]
    finally:
        end(first)
        end(second)


def test_the_slots_of_a_killed_process_are_free_at_once() -> None:
    process, got = hold(4, "run-a")
    assert len(got) == 4
    end(process)
    with leased(4, "run-b", waiting=None) as taken:
        assert taken == ["0", "1", "2", "3"]


def test_waiting_ends_when_the_slots_are_given_back_and_names_the_holder_meanwhile() -> None:
    process, _ = hold(3, "run-a")
    messages: list[str] = []

    def waiting(message: str) -> None:
        messages.append(message)
        if len(messages) == 2:
            end(process)

    with leased(2, "run-b", waiting=waiting) as taken:
        assert taken == ["0", "1"]
    assert "2 of 4 GPU slots are needed; 0 is held by run-a" in messages[0]


def test_two_that_want_more_than_half_each_both_get_their_turn() -> None:
    code = (
        "from rpg.processes.gpu_slots import leased\nimport time\n"
        "with leased(3, 'x', waiting=lambda _: None): time.sleep(0.2)"
    )
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    deadline = time.monotonic() + 60
    assert [process.wait(deadline - time.monotonic()) for process in started] == [0] * 4


def test_more_slots_than_there_are_is_an_error_not_a_wait() -> None:
    message = "5 GPU slots are asked for and this machine has 4"
    with pytest.raises(TooFewSlotsError, match=message), leased(5, "run", waiting=lambda _: None):
        pass


def test_the_holder_is_gone_from_the_file_when_it_gives_back(tmp_path: Path) -> None:
    with leased(1, "run-a", waiting=None):
        assert json.loads((tmp_path / "slots" / "0.lock").read_text())["holder"] == "run-a"
    assert (tmp_path / "slots" / "0.lock").read_text() == ""


def test_declared_slots_stand_for_gpus_and_the_cpu_needs_none() -> None:
    assert slots_here({SLOTS: "a, b,"}) == ["a", "b"]
    assert slots_wanted("auto", 2) == 2
    assert slots_wanted("cpu", 2) == 0
    with leased(0, "run", waiting=None) as nothing:
        assert nothing == []


@pytest.mark.parametrize(
    ("codes", "meant"),
    [
        ([0, 0], 0),
        ([0, 143], 143),
        ([143, 1], 1),
        # A rank that was killed is why its peer complains.
        ([1, -9], 137),
        ([None, 2], 2),
        # The signal that asks to stop met one before it listened.
        ([-15, 143], 143),
        ([-15, -9], 137),
        ([None, None], 0),
    ],
)
def test_many_exit_codes_become_the_one_that_tells_the_cause(codes: list[int | None], meant: int) -> None:
    assert verdict(codes) == meant
